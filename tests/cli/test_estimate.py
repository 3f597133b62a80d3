"""``forge config --estimate``."""

from __future__ import annotations

import re

import pytest

from forge_core.config import load_config
from forge_core.runs.estimate import estimate_line
from tests.cli.conftest import Forge
from tests.docs.documents import ROOT

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


def rows(out: str) -> dict[str, dict[str, str]]:
    """The table by role, then by column."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("| ")]
    head, *body = lines
    return {line[0]: dict(zip(head, line, strict=True)) for line in body}


def test_it_prints_the_memory_of_each_role_and_says_that_it_fits(forge: Forge):
    result = forge("config", QUICKSTART, "--estimate", "grpo.beta=0.1")
    assert result.status == 0, result.err
    table = rows(result.out)
    assert table.keys() == {"generator", "trainer", "reference"}
    trainer = {
        name: float(value) for name, value in table["trainer"].items() if name not in ("role", "where") and value
    }
    assert sum(trainer.values()) - trainer["total"] == pytest.approx(trainer["total"], abs=0.02)
    assert "memory of this machine:" in result.out
    assert "GiB: fits" in result.out
    assert "about 6,144 tokens in 512 episodes" in result.out


def test_on_imagined_gpus_what_does_not_fit_is_a_failure_that_names_the_settings(forge: Forge):
    sizes = ["model.hidden_size=4096", "model.intermediate_size=12288", "model.num_layers=36", "model.num_heads=32"]
    large = ["config", QUICKSTART, "--estimate", "--gpu-memory", "80", "model.head_dim=128", *sizes]
    result = forge(*large)
    assert result.status == 1
    assert rows(result.out)["trainer"]["where"] == "GPU 1"
    assert "GPU 0: 25.59 of 80.00 GiB: fits" in result.out
    assert "GPU 1: " in result.out
    assert "does not fit; settings that change it:\n  training.token_budget (lower)" in result.out
    mended = ["training.dtype=bfloat16", "training.activation_checkpointing=full"]
    enough = forge(*large, *mended, "parallelism.data_parallel_shard_degree=4")
    assert enough.status == 0, enough.out
    assert rows(enough.out)["trainer, each of 4 ranks"]["where"] == "GPU 1, 2, 3, 4"


HALF_A_BILLION = [
    *("model.hidden_size=1024", "model.intermediate_size=3072", "model.num_layers=28", "model.num_heads=16"),
    *("model.head_dim=128", "training.dtype=bfloat16", "generator.dtype=bfloat16", "grpo.beta=0.1"),
]


def test_of_one_gpu_that_generator_and_trainer_share_it_counts_what_is_there_at_a_time(forge: Forge):
    one = ["config", QUICKSTART, "--estimate", "--gpu-memory", "80", "--gpus", "1", *HALF_A_BILLION]
    needed = {}
    for sharing in ("sleep", "split"):
        result = forge(*one, "generator.backend=vllm", f"generator.sharing={sharing}")
        assert result.status == 0, result.out
        table = rows(result.out)
        assert {row["where"] for row in table.values()} == {"GPU 0"}
        (line,) = re.findall(r"GPU 0: ([\d.]+) of 80.00 GiB: fits", result.out)
        needed[sharing] = float(line)
        totals = {role: float(row["total"]) for role, row in table.items()}
        said = (
            "take turns on it (generator.sharing=sleep)"
            if sharing == "sleep"
            else "hold their memory on it at the same"
        )
        assert f"GPU 0: generator and trainer {said}" in result.out
    assert needed["split"] == pytest.approx(sum(totals.values()), abs=0.03)
    assert max(totals.values()) < needed["sleep"] < needed["split"]


def test_too_little_for_what_shares_a_gpu_is_a_failure(forge: Forge):
    one = ["config", QUICKSTART, "--estimate", "--gpu-memory", "10", "--gpus", "1", *HALF_A_BILLION]
    result = forge(*one)
    assert result.status == 1
    assert "GPU 0: generator and trainer hold their memory on it at the same time" in result.out
    assert "does not fit" in result.out


def test_one_minute_and_one_step_are_said_as_such():
    one = load_config(QUICKSTART, ["steps=1", "warm_start.steps=1", "eval.prompts=1", "training.batch_size=64"])
    assert estimate_line(one).endswith("stored, about 1 minute for 1 step")
    assert estimate_line(load_config(QUICKSTART)).endswith(" steps")


def test_settings_that_several_devices_share_are_named_once(forge: Forge):
    sizes = ["model.hidden_size=4096", "model.intermediate_size=12288", "model.num_layers=36", "model.num_heads=32"]
    ranks = "parallelism.data_parallel_shard_degree=2"
    result = forge("config", QUICKSTART, "--estimate", "--gpu-memory", "40", "model.head_dim=128", *sizes, ranks)
    assert result.status == 1
    assert result.out.count("  training.token_budget (lower)") == 1
    assert result.out.count("does not fit; the same settings change it") == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--gpu-memory", "80"], "give both"),
        (["--estimate", "--gpu-memory", "0"], "must be above 0"),
        (["--estimate", "--gpus", "1"], "--gpus is the number of GPUs that --estimate --gpu-memory GIB imagines"),
        (["--estimate", "--gpu-memory", "80", "--gpus", "0"], "0"),
        (
            ["--estimate", "--gpu-memory", "80", "--gpus", "2", "parallelism.data_parallel_shard_degree=4"],
            "not enough GPUs: 5 are wanted",
        ),
        (
            ["--estimate", "--gpu-memory", "80", "--gpus", "2", "parallelism.data_parallel_shard_degree=4"],
            "estimate for more GPUs: --gpus N",
        ),
        (["--estimate", "~model"], "model: is missing"),
        (["--estimate", "services.trainer.with_gpus=true"], "not enough GPUs"),
        (["--estimate", "services.trainer.with_gpus=true"], "GPUs that this machine lacks: --gpu-memory GIB"),
    ],
)
def test_bad_input_says_what_is_wrong(forge: Forge, argv: list[str], said: str):
    result = forge("config", QUICKSTART, *argv)
    assert result.status == 2
    assert said in result.err
