"""Bad input ends with status 2 and a message that names the key or file and what to do, before an engine is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Forge

GOOD: dict[str, Any] = {
    "store": "store",
    "model": {"vocabulary": "0123456789+= ", "max_position_embeddings": 32},
    "dataset": {"path": "sums.jsonl"},
    "training": {"batch_size": 8, "seq_len": 16, "token_budget": 256},
    "grpo": {"n_samples": 4, "beta": 0},
    "rollout": {"max_new_tokens": 4},
    "rewards": {"functions": [{"path": "exact_match"}]},
    "eval": {"prompts": 2},
}
CASES = {
    "an unknown key": (["grpo.betta=0.1"], ["grpo.betta: unknown key", "did you mean grpo.beta"]),
    "a wrong type": (["steps=many"], ["steps: is 'many'", "whole number"]),
    "a value out of range": (["eval.holdout=1.5"], ["eval.holdout: is 1.5", "below 1"]),
    "a data set that does not exist": (["dataset.path=nowhere.jsonl"], ["dataset.path", "'nowhere.jsonl'"]),
    "a prompt column that is missing": (
        ["dataset.prompt_column=text"],
        ["dataset.prompt_column", "'text'", "question, answer"],
    ),
    "an answer column that is missing": (["dataset.path=plain.jsonl"], ["dataset.answer_column", "question"]),
    "a model folder without a tokenizer": (["model=no_tokenizer"], ["no_tokenizer", "has no tokenizer", "save_pretr"]),
    "an unsupported architecture": (["model=other_model"], ["other_model/config.json", "GPT2LMHeadModel", "LlamaFor"]),
    "a model folder that does not exist": (["model=./nowhere"], ["model './nowhere'", "no such folder"]),
    "a store that is a file": (["store=sums.jsonl"], ["sums.jsonl", "store"]),
    "prompts longer than the limit": (
        ["training.seq_len=6"],
        ["rollout.max_prompt_tokens", "8 of the first 8", "training.seq_len=10"],
    ),
    "a group of one sample": (["grpo.n_samples=1"], ["grpo.n_samples: is 1", "use 2 or more"]),
    "a KL penalty without a reference": (
        ["grpo.beta=0.1", "services.ref_model=null"],
        ["grpo.beta", "services.ref_model is null", "set grpo.beta=0"],
    ),
    "a reward that does not exist": (
        ["rewards.functions=[{path: exact_mach}]"],
        ["exact_mach", "did you mean exact_m"],
    ),
    "a reward file that does not exist": (["rewards.functions=[{path: 'no.py:f'}]"], ["no.py:f", "no such file"]),
    "a reward class that has no grade": (
        ["rewards.functions=[{path: 'units.py:Wrong'}]"],
        ["rewards.functions: ", "units.py:Wrong has no method grade(prompt, completion, metadata)"],
    ),
    "a reward function of two arguments": (
        ["rewards.functions=[{path: 'units.py:two'}]"],
        ["rewards.functions: ", "units.py:two cannot be called as (prompt, completion, metadata)"],
    ),
    "a misspelt option of a reward": (
        ["rewards.functions=[{path: 'units.py:Units', options: {wnted: mm}}]"],
        ["rewards.functions: ", "units.py:Units", "'wnted'", "its options are wanted"],
    ),
    "no reward at all": (["rewards.functions=[]"], ["rewards.functions: is empty"]),
    "no data set": (["dataset=null"], ["dataset: is missing", "dataset.path"]),
    "no model": (["model=null"], ["model: is missing"]),
    "groups that do not fill a batch": (
        ["grpo.n_samples=3"],
        ["use training.batch_size=6 or 9"],
    ),
    "a character that the vocabulary lacks": (["model.vocabulary=0123456789"], ["row 0", "['+', '=']", "add them"]),
    "a flag in place of a key": (["--trainer.procs", "4"], ["type services.trainer.procs=4"]),
}


UNITS = """
class Wrong:
    pass

def two(prompt, completion):
    return 0.0

class Units:
    def __init__(self, wanted="cm"):
        self.wanted = wanted

    def grade(self, prompt, completion, metadata):
        return 0.0
"""


@pytest.fixture
def project(folder: Path) -> Path:
    """A folder with a good configuration, and with what the wrong ones name."""
    (folder / "run.yaml").write_text(yaml.safe_dump(GOOD))
    rows = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(1, 9)]
    rows[-1]["question"] = "10+10="
    rows = [{**row, "question": row["question"].rjust(5, "0")} for row in rows]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "plain.jsonl").write_text("\n".join(json.dumps({"question": row["question"]}) for row in rows))
    (folder / "units.py").write_text(UNITS)
    for name, architecture in (("no_tokenizer", "LlamaForCausalLM"), ("other_model", "GPT2LMHeadModel")):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        (folder / name / "model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_with_its_name_and_a_remedy(forge: Forge, project: Path, case: str):
    overrides, expected = CASES[case]
    result = forge("train", "run.yaml", *overrides)
    assert result.status == 2
    assert result.err.startswith("forge train: ")
    for text in expected:
        assert text in result.err
    assert "Traceback" not in result.err
    assert not (project / "store" / "runs").exists(), "nothing is stored for a run that cannot start"


@pytest.mark.parametrize("case", ["a group of one sample", "a reward class that has no grade"])
def test_the_same_mistake_is_refused_by_forge_try(forge: Forge, project: Path, case: str):
    overrides, expected = CASES[case]
    result = forge("try", "run.yaml", *overrides)
    assert result.status == 2
    for text in expected:
        assert text in result.err


WARNED = (
    "a group of one sample", "a reward that does not exist", "a reward file that does not exist", "no reward at all",
    "no data set", "groups that do not fill a batch",
)  # fmt: skip


@pytest.mark.parametrize("case", WARNED)
def test_forge_config_warns_of_what_forge_train_refuses(forge: Forge, project: Path, case: str):
    overrides, expected = CASES[case]
    result = forge("config", "run.yaml", *overrides)
    assert result.status == 0, "the configuration itself is valid"
    assert "warning: forge train would refuse: " in result.err
    for text in expected:
        assert text in result.err


def test_forge_config_warns_of_a_missing_teacher_and_loss_file(forge: Forge, project: Path):
    assert "would refuse: loss.teacher: is missing" in forge("config", "run.yaml", "loss.name=distill").err
    own = forge("config", "run.yaml", "loss={name: custom, path: 'no.py:f'}")
    assert own.status == 0
    assert "would refuse: loss.path: no.py:f: no such file" in own.err


def test_forge_config_imports_no_code_and_says_nothing_of_what_can_train(forge: Forge, project: Path):
    (project / "units.py").write_text("raise SystemExit('imported')")
    result = forge("config", "run.yaml", "rewards.functions=[{path: 'units.py:Units'}]")
    assert result.status == 0
    assert "would refuse" not in result.err


@pytest.mark.parametrize("command", ["config", "train"])
def test_a_configuration_of_another_command_is_told_by_its_keys(forge: Forge, project: Path, command: str):
    (project / "sft.yaml").write_text(
        "model: ./m\ndataset: {path: chats.jsonl}\nlora: {rank: 4}\nvalidation: {rows: 8}\n"
    )
    (project / "retrain.yaml").write_text("name: sums\nconfig: run.yaml\n")
    for file, remedy in (("sft.yaml", "use forge sft, and forge config --sft"), ("retrain.yaml", "use forge retrain")):
        result = forge(command, file)
        assert result.status == 2
        assert remedy in result.err
    assert "use forge" not in forge(command, "run.yaml", "grpo.betta=1").err


def test_some_prompts_that_are_too_long_are_announced_as_dropped(project: Path):
    from forge_core.config import load_config
    from forge_core.runs.checks import check_run

    (warning,) = check_run(load_config("run.yaml", ["training.seq_len=9"]))
    assert "1 of the first 8 prompts" in warning
    assert "dropped as prompt_too_long, never truncated; training.seq_len=10 would hold them" in warning


SCRIPT = """
import json, sys
from flows.cli import main
status = main(sys.argv[1:])
heavy = [m for m in ("torchtitan", "transformers", "prefect", "torch") if m in sys.modules]
print(json.dumps([status, heavy]))
"""


def refusal(*argv: str, **environment: str) -> tuple[int, list[str], str, float]:
    """Status, heavy modules loaded, message and seconds of a command in a process of its own."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *argv], env={**os.environ, **environment}, capture_output=True, text=True
    )
    status, heavy = json.loads(done.stdout.splitlines()[-1])
    return status, heavy, done.stderr, time.monotonic() - started


@pytest.mark.parametrize(
    "case",
    [
        "an unknown key",
        "a reward class that has no grade",
        "a model folder without a tokenizer",
        "prompts longer than the limit",
    ],
)
def test_a_refusal_comes_before_an_engine_or_prefect_is_even_imported(project: Path, case: str):
    status, heavy, message, seconds = refusal("train", "run.yaml", *CASES[case][0])
    assert (status, heavy) == (2, []), message
    assert seconds < 10, "five seconds on an idle machine"


@pytest.mark.parametrize("store", ["sums.jsonl/store", "/proc/forge/store", "file://relative", "ftp://host/store"])
def test_a_store_that_cannot_be_written_is_named(forge: Forge, project: Path, store: str):
    result = forge("train", "run.yaml", f"store={store}")
    assert result.status == 2
    assert store in result.err
    assert "Traceback" not in result.err


@pytest.mark.server
def test_wrong_s3_credentials_are_refused_naming_the_store(project: Path, s3_store_uri: str):
    wrong = {"AWS_SECRET_ACCESS_KEY": "wrong"}
    status, heavy, message, seconds = refusal("train", "run.yaml", f"store={s3_store_uri}", **wrong)
    assert (status, heavy) == (2, [])
    assert s3_store_uri in message
    assert "AWS_SECRET_ACCESS_KEY" in message
    assert seconds < 15
