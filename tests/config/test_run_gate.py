"""The gate before a run: refused with the remedy, or warned, or passed."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.config import ConfigError, config_warnings, load_config, validate_for_training

ROOT = Path(__file__).resolve().parents[2]
GOOD = {
    "model": {"vocabulary": "0123456789", "max_position_embeddings": 64},
    "dataset": {"path": "prompts.jsonl"},
    "training": {"batch_size": 16, "seq_len": 64},
    "grpo": {"n_samples": 4, "beta": 0},
    "rollout": {"max_new_tokens": 32},
    "rewards": {"functions": [{"path": "exact_match"}]},
}


def refusal(*overrides: str, gpus: int = 0) -> str:
    with pytest.raises(ConfigError) as caught:
        validate_for_training(load_config(GOOD, overrides), gpus=gpus)
    assert len(caught.value.problems) == 1, caught.value.problems
    return caught.value.problems[0]


def test_a_complete_configuration_passes_without_a_word():
    assert validate_for_training(load_config(GOOD), gpus=0) == []


def test_the_quickstart_passes_without_a_word():
    assert validate_for_training(load_config(ROOT / "configs" / "quickstart.yaml"), gpus=0) == []


def test_an_empty_configuration_is_told_all_that_is_missing():
    with pytest.raises(ConfigError) as caught:
        validate_for_training(load_config({}), gpus=0)
    text = str(caught.value)
    for part in ("model: is missing", "dataset: is missing", "dataset.path=", "rewards.functions: is empty"):
        assert part in text


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["~model"], ["model: is missing", "model=Qwen/Qwen3-0.6B"]),
        (["~dataset"], ["dataset: is missing", "set dataset.path"]),
        (["~rewards"], ["rewards.functions: is empty", "rewards.functions='[{path: exact_match}]'"]),
        (
            ["training.batch_size=14"],
            ["training.batch_size: 14 x", "= 14 episodes", "batch_size=12 or 16", "n_samples=2"],
        ),
        (["training.batch_size=3"], ["use training.batch_size=4, or grpo.n_samples=3"]),
        (
            ["training.batch_size=5", "training.gradient_accumulation_steps=2"],
            ["5 x training.gradient_accumulation_steps 2 = 10", "training.batch_size=4 or 6"],
        ),
        (["grpo.n_samples=1"], ["grpo.n_samples: is 1", "use 2 or more"]),
        (["grpo.temperature=0"], ["grpo.temperature: is 0", "above 0"]),
        (["rollout.top_p=0.9"], ["rollout.top_p: is 0.9", "rollout.top_p=1", "rollout.allow_truncated_sampling=true"]),
        (["rollout.top_k=20"], ["rollout.top_k: is 20", "rollout.top_k=0"]),
        (["rollout.min_p=0.1"], ["rollout.min_p: is 0.1", "rollout.min_p=0"]),
        (["rollout.shards=5"], ["rollout.shards: is 5", "only 4 groups", "use at most 4"]),
        (["rollout.max_new_tokens=64"], ["rollout.max_new_tokens: is 64", "training.seq_len 64", "less than 64"]),
        (["rollout.max_prompt_tokens=40"], ["max_prompt_tokens=32", "training.seq_len=72"]),
        (["training.token_budget=63"], ["training.token_budget: is 63", "at least 64"]),
        (["training.seq_len=65"], ["model.max_position_embeddings: is 64", "training.seq_len=64"]),
        (["model.num_kv_heads=3"], ["model.num_kv_heads: 3 does not divide model.num_heads 4"]),
        (["model.head_dim=33"], ["model.head_dim: is 33", "even"]),
        (["model.vocabulary=aab"], ["model.vocabulary", "each character once"]),
        (["eval.holdout=0"], ["eval.holdout: is 0", "eval.holdout=0.1", "eval.split=test", "eval.prompts=0"]),
        (["parallelism.tensor_parallel_degree=2"], ["parallelism.tensor_parallel_degree: is 2", "set it to 1"]),
    ],
)
def test_what_cannot_train_is_refused_with_the_values_that_would_work(overrides, parts):
    problem = refusal(*overrides)
    for part in parts:
        assert part in problem


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.top_p=0.9", "rollout.allow_truncated_sampling=true"],
        ["eval.prompts=0", "eval.holdout=0"],
        ["eval.holdout=0", "eval.split=test"],
        ["rollout.shards=4"],
        ["training.batch_size=2", "training.gradient_accumulation_steps=2"],
        ["rollout.max_prompt_tokens=32"],
        ["services.ref_model=null"],
    ],
)
def test_what_can_train_passes(overrides):
    assert validate_for_training(load_config(GOOD, overrides), gpus=0) == []


def test_the_sizes_a_message_offers_do_work():
    for size, accumulation, samples in [(14, 1, 4), (3, 2, 8), (5, 4, 6), (100, 3, 64)]:
        settings = [f"training.gradient_accumulation_steps={accumulation}", f"grpo.n_samples={samples}"]
        problem = refusal(f"training.batch_size={size}", *settings)
        offered = problem.split("use training.batch_size=")[1].split(", or")[0].split(" or ")
        for works in offered:
            assert validate_for_training(load_config(GOOD, [f"training.batch_size={works}", *settings]), gpus=0) == []


def test_services_that_left_gpus_open_run_on_any_machine():
    for gpus in (0, 1, 8):
        assert validate_for_training(load_config(GOOD), gpus=gpus) == []


def test_more_gpus_than_there_are_is_refused_with_the_way_out():
    wanted = [
        "services.generator.with_gpus=true",
        "services.trainer.with_gpus=true",
        "services.ref_model.with_gpus=true",
    ]
    beta = "grpo.beta=0.1"
    none = refusal(*wanted, beta, gpus=0)
    assert (
        "3 GPUs in all (services.generator 1, services.trainer 1, services.ref_model 1), but this machine has 0" in none
    )
    assert "services.generator.with_gpus=false services.trainer.with_gpus=false" in none
    assert "run the reference on the CPU (services.ref_model.with_gpus=false)" in refusal(*wanted, beta, gpus=2)
    assert "share what there is (services.generator.with_gpus=null" in refusal(*wanted, beta, gpus=1)
    assert validate_for_training(load_config(GOOD, [*wanted, beta]), gpus=3) == []
    assert validate_for_training(load_config(GOOD, wanted), gpus=2) == [], "no reference runs at beta 0"


def test_the_remedy_for_too_few_gpus_mends_it():
    wanted = ["services.generator.with_gpus=true", "services.trainer.with_gpus=true"]
    for gpus in (0, 1):
        mended = refusal(*wanted, gpus=gpus).split("(")[-1].split(")")[0].split()
        assert validate_for_training(load_config(GOOD, [*wanted, *mended]), gpus=gpus) == []


def test_gpus_are_counted_only_when_a_service_insists(monkeypatch):
    monkeypatch.setattr("forge_core.config.run_gate._count_gpus", lambda: pytest.fail("counted"))
    assert validate_for_training(load_config(GOOD)) == []


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["max_staleness=2"], ["max_staleness is 2", "embedded"]),
        (
            ["services.trainer.procs=2", "parallelism={tensor_parallel_degree: 2, data_parallel_shard_degree: 2}"],
            ["services.trainer.procs is 2", "need 4 processes", "services.trainer.procs=4"],
        ),
        (["services.generator.num_replicas=2"], ["services.generator asks for 2 x 1 processes"]),
        (["store=memory://x"], ["store is memory://x", "cannot be resumed"]),
        (["training.warmup_steps=101"], ["training.warmup_steps is 101", "100 optimizer steps"]),
    ],
)
def test_what_is_odd_is_warned_about(overrides, parts):
    warnings = "\n".join(config_warnings(load_config(GOOD, overrides)))
    for part in parts:
        assert part in warnings


def test_warnings_are_returned_by_the_gate_not_raised():
    config = load_config(GOOD, ["max_staleness=4"])
    assert validate_for_training(config, gpus=0) == config_warnings(config) != []
