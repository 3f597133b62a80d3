"""The gate before a run: refused with the remedy, or warned, or passed."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from forge_core.config import ConfigError, config_warnings, load_config, validate_for_training
from forge_core.config.gpu_gate import machine_problems
from forge_core.config.vllm_fields import engine_arguments, sampling_parameters
from forge_core.devices import place

ROOT = Path(__file__).resolve().parents[2]
GOOD = {
    "model": {"vocabulary": "0123456789", "max_position_embeddings": 64},
    "dataset": {"path": "prompts.jsonl"},
    "training": {"batch_size": 16, "seq_len": 64},
    "grpo": {"n_samples": 4, "beta": 0},
    "rollout": {"max_new_tokens": 32},
    "rewards": {"functions": [{"path": "exact_match"}]},
}
VLLM = ["generator.backend=vllm"]
ALL_TRUE = [f"services.{role}.with_gpus=true" for role in ("generator", "trainer", "ref_model")]


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
        (
            ["parallelism.tensor_parallel_degree=3"],
            ["parallelism.tensor_parallel_degree: is 3", "4 attention heads", "1, 2"],
        ),
        (
            ["parallelism.pipeline_parallel_degree=2"],
            ["parallelism.pipeline_parallel_degree: is 2", "tie_word_embeddings"],
        ),
        (
            ["parallelism.pipeline_parallel_degree=3", "model.tie_word_embeddings=false"],
            ["parallelism.pipeline_parallel_degree: is 3", "2 layers"],
        ),
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
    none = refusal(*ALL_TRUE, "grpo.beta=0.1", gpus=0)
    assert (
        "3 are wanted (services.generator 1, services.trainer 1, services.ref_model 1), but this machine has 0" in none
    )
    assert "services.generator.with_gpus=false services.trainer.with_gpus=false" in none
    engines = refusal(*VLLM, "services.generator.num_replicas=2", gpus=1)
    assert "services.generator 2, services.trainer 1" in engines
    assert "use services.generator.num_replicas=1" in engines


def test_the_guides_three_gpus_may_be_two_or_one_with_a_warning():
    config = load_config(GOOD, [*ALL_TRUE, "grpo.beta=0.1"])
    assert validate_for_training(config, gpus=3) == []
    (two,) = validate_for_training(config, gpus=2)
    assert "the reference shares the trainer's" in two
    (one,) = validate_for_training(config, gpus=1)
    assert "one GPU for all roles" in one
    assert "generator.sharing=sleep" in one


def test_on_a_shared_gpu_staleness_gains_nothing():
    config = load_config(GOOD, ["max_staleness=1"])
    (shared,) = validate_for_training(config, gpus=1)
    assert "share one GPU, where little overlaps" in shared
    assert "max_staleness=0" in shared
    assert validate_for_training(config, gpus=2) == validate_for_training(config, gpus=0) == []


def test_gpus_are_not_counted_for_a_configuration_that_is_refused_anyway(monkeypatch):
    monkeypatch.setattr("forge_core.config.gpu_gate.visible_gpus", lambda: pytest.fail("counted"))
    with pytest.raises(ConfigError, match=r"grpo\.n_samples"):
        validate_for_training(load_config(GOOD, ["grpo.n_samples=1"]))


def test_vllm_passes_on_a_cpu_with_any_number_of_engines_and_open_batches():
    several = [*VLLM, "services.generator.num_replicas=2", "max_staleness=4"]
    assert validate_for_training(load_config(GOOD, several), gpus=0) == []


def test_float8_without_a_gpu_that_has_it_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"quantize\.float8: is true, but the trainer is on cpu"):
        validate_for_training(load_config(GOOD, ["quantize.float8=true"]))


def test_vllm_that_is_not_installed_is_refused_with_the_commands_that_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # how Python itself says that there is no such module
    problem = refusal(*VLLM)
    for part in (
        "not installed",
        "pip install 'forge-rl[vllm]'",
        "scripts/install_vllm_cpu.sh",
        "generator.backend=hf",
    ):
        assert part in problem


def test_a_vllm_of_the_other_kind_is_refused():
    config = load_config(GOOD, VLLM)
    (problem,) = machine_problems(config, place(config, ("0", "1")))
    assert "works on a GPU, but the vLLM that is installed is for CPUs" in problem
    assert machine_problems(config, place(config, ())) == []


@pytest.mark.parametrize(
    ("backend", "gpus", "way"), [([], 1, "generator.backend=hf"), (VLLM, 0, "services.generator.num_replicas")]
)
def test_engines_that_share_no_gpu_are_warned_about(backend, gpus, way):
    (warning,) = validate_for_training(load_config(GOOD, [*backend, "generator.engines_per_gpu=2"]), gpus=gpus)
    assert warning.startswith("generator.engines_per_gpu is 2, but ")
    assert way in warning


def test_engines_that_do_not_fit_on_a_gpu_together_are_refused(monkeypatch):
    for module in ("forge_core.devices", "forge_core.config.gpu_gate"):
        monkeypatch.setattr(f"{module}.visible_gpus", lambda: ("0", "1"))
    three = [*VLLM, "generator.engines_per_gpu=3", "generator.engine_args.gpu_memory_utilization=0.4"]
    config = load_config(GOOD, three)
    problems = [p for p in machine_problems(config, place(config, ("0", "1"))) if "utilization" in p]
    assert problems == [
        "generator.engine_args.gpu_memory_utilization: 3 engines a GPU (generator.engines_per_gpu) take 120% of its "
        "memory: use 0.33 or less"
    ]
    assert machine_problems(config, place(config, ())) == []
    fewer = load_config(GOOD, [*three, "generator.engines_per_gpu=2"])
    assert not any("utilization" in p for p in machine_problems(fewer, place(fewer, ("0", "1"))))


FULL = "generator.engine_args.gpu_memory_utilization=0.95"


def beside(monkeypatch, gpus: tuple[str, ...], device: str, *overrides: str) -> list[str]:
    """Problems of a reward model on ``device``, on a machine with ``gpus``: generator, trainer and what is left."""
    for module in ("forge_core.devices", "forge_core.config.gpu_gate"):
        monkeypatch.setattr(f"{module}.visible_gpus", lambda: gpus)
    model = f"rewards.functions=[{{name: reward_model, model: m, device: '{device}'}}]"
    config = load_config(GOOD, [*VLLM, model, *overrides])
    return [problem for problem in machine_problems(config, place(config, gpus)) if "reward_model" in problem]


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
@pytest.mark.parametrize(("gpus", "remedy"), [(("4", "5", "6"), "cuda:2"), (("4", "5"), "cpu")])
def test_a_reward_model_on_a_gpu_that_vllm_fills_is_refused(device, gpus, remedy, monkeypatch):
    half = ["generator.engines_per_gpu=2", "generator.engine_args.gpu_memory_utilization=0.475"]
    assert beside(monkeypatch, gpus, device, *half)
    (problem,) = beside(monkeypatch, gpus, device, FULL)
    assert problem.startswith("rewards.functions: reward_model is on cuda:0, where vLLM takes 95% of the memory")
    assert f"set its device to {remedy}, or generator.engine_args.gpu_memory_utilization=0.9 or less" in problem


@pytest.mark.parametrize(
    ("device", "overrides"),
    [
        ("cuda:1", [FULL]),
        ("cpu", [FULL]),
        ("cuda:0", []),
        ("cuda:0", ["generator.engine_args.gpu_memory_utilization=0.9"]),
        ("cuda:0", [FULL, "services.trainer.with_gpus=false"]),  # may be a generator role, whose scorers are elsewhere
    ],
)
def test_a_reward_model_elsewhere_or_with_room_passes(device, overrides, monkeypatch):
    assert beside(monkeypatch, ("0", "1"), device, *overrides) == []


def test_prompts_in_parts_are_refused_where_vllm_would_end():
    config = load_config(GOOD, [*VLLM, "generator.engine_args.enable_chunked_prefill=true"])
    (problem,) = machine_problems(config, place(config, ()))
    assert problem.startswith("generator.engine_args.enable_chunked_prefill: ")
    assert not any("chunked" in other for other in machine_problems(config, place(config, ("0", "1"))))
    off = load_config(GOOD, [*VLLM, "generator.engine_args.enable_chunked_prefill=false"])
    assert machine_problems(off, place(off, ())) == []


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("engine_args.model=x", ["Forge sets it itself", "set model instead"]),
        ("engine_args.tensor_parallel_size=2", ["set services.generator.procs instead"]),
        ("engine_args.enable_sleep_mode=true", ["set generator.sharing instead"]),
        ("engine_args.max_model_len=64", ["set training.seq_len instead"]),
        ("engine_args.logprobs_mode=raw_logits", ["leave it out"]),
        ("engine_args.max_num_seq=8", ["no such setting", "max_num_seqs"]),
        ("engine_args.trust_remote_code=true", ["names code", "leave it out"]),
        ("engine_args.zzzz=8", ["no such setting", "vLLM's documentation"]),
        ("sampling_params.max_tokens=8", ["set rollout.max_new_tokens instead"]),
        ("sampling_params.output_kind=0", ["leave it out"]),
        ("sampling_params.stop_token_id=[1]", ["no such setting", "stop_token_ids"]),
        ("sampling_params.repetition_penalty=1.1", ["is 1.1", "rollout.allow_truncated_sampling=true"]),
    ],
)
def test_settings_of_vllm_that_are_forges_own_or_unknown_are_refused(override, parts):
    problem = refusal(*VLLM, f"generator.{override}")
    assert problem.startswith(f"generator.{override.split('=')[0]}: ")
    for part in parts:
        assert part in problem


def test_settings_of_vllm_that_are_the_users_pass():
    given = [
        "generator.engine_args={max_num_seqs: 8, gpu_memory_utilization: 0.5, enforce_eager: true}",
        "generator.sampling_params={stop: ['x'], repetition_penalty: 1.0}",
    ]
    assert validate_for_training(load_config(GOOD, [*VLLM, *given]), gpus=0) == []
    biased = "generator.sampling_params.presence_penalty=0.5"
    accepted = "rollout.allow_truncated_sampling=true"
    assert validate_for_training(load_config(GOOD, [*VLLM, biased, accepted]), gpus=0) == []


@pytest.mark.engine
def test_the_names_read_from_vllms_source_are_those_that_it_takes():
    from vllm import AsyncEngineArgs, SamplingParams

    public = lambda names: {name for name in names if not name.startswith("_")}
    assert engine_arguments().keys() == public(field.name for field in dataclasses.fields(AsyncEngineArgs))
    assert sampling_parameters().keys() == public(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["max_staleness=2"], ["max_staleness is 2", "embedded"]),
        (
            ["services.trainer.procs=2", "parallelism={tensor_parallel_degree: 2, data_parallel_shard_degree: 2}"],
            ["services.trainer.procs is 2", "need 4 processes", "services.trainer.procs=4"],
        ),
        (["services.trainer.procs=4"], ["services.trainer.procs is 4", "data_parallel_shard_degree=4"]),
        (["services.trainer.num_replicas=2"], ["there is one trainer", "parallelism.data_parallel_shard_degree"]),
        (["services.generator.num_replicas=2"], ["services.generator asks for 2 x 1 processes"]),
        (["services.ref_model.procs=2", "grpo.beta=0.1"], ["services.ref_model asks for 1 x 2", "reference runs once"]),
        (["generator.engine_args.max_num_seqs=2"], ["generator.engine_args is for vLLM"]),
        (["store=memory://x"], ["store is memory://x", "cannot be resumed"]),
        (["training.warmup_steps=101"], ["training.warmup_steps is 101", "100 optimizer steps"]),
    ],
)
def test_what_is_odd_is_warned_about(overrides, parts):
    warnings = "\n".join(config_warnings(load_config(GOOD, overrides)))
    for part in parts:
        assert part in warnings


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        ("parallelism.data_parallel_shard_degree=2", "parallelism asks for 2 more"),
        ("training.own_process=true", "training.own_process asks for another"),
    ],
)
def test_ranks_need_a_store_that_every_process_reaches(ranks, wanted):
    refused = rf"store: memory://x exists in one process.*{wanted} to train in.*s3://bucket"
    with pytest.raises(ConfigError, match=refused):
        validate_for_training(load_config(GOOD, ["store=memory://x", ranks]), gpus=0)
    validate_for_training(load_config(GOOD, ["store=memory://x"]), gpus=0)


def test_warnings_are_returned_by_the_gate_not_raised():
    config = load_config(GOOD, ["max_staleness=4"])
    assert validate_for_training(config, gpus=0) == config_warnings(config) != []
