"""From a configuration and the GPUs of a machine to the settings of the engines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_core.config import load_config
from forge_core.devices import place
from forge_core.generation.vllm_settings import VLLMSettings
from forge_core.runs.engines import OWN_MEMORY, SHARED_MEMORY, build_generator, takes_turns
from forge_core.runs.planning import shard_count, shards_at_once

ONE = ("GPU-5",)


def host(*overrides: str, gpus: tuple[str, ...], backend: str = "vllm") -> Any:
    config = load_config({"generator": {"backend": backend}}, overrides)
    return SimpleNamespace(
        config=config, placement=place(config, gpus), run_id="r", role=None, stop=None, cpu_threads=2, weights_dir=Path
    )


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings that the generator of a host is made with."""
    made: list[VLLMSettings] = []
    monkeypatch.setattr("forge_core.generation.vllm.VLLMGenerator", lambda *_, settings, **__: made.append(settings))

    def build(*overrides: str, gpus: tuple[str, ...]) -> VLLMSettings:
        build_generator(host(*overrides, gpus=gpus), 0)
        return made.pop()

    return build


def test_replicas_of_several_gpus_reach_the_engines(built: Any) -> None:
    settings = built("services.generator={num_replicas: 2, procs: 2}", "grpo.beta=0", gpus=tuple("12345"))
    assert settings.gpus == (("1", "2"), ("3", "4"))
    assert [settings.arguments(i, Path("w"))["tensor_parallel_size"] for i in (0, 1)] == [2, 2]
    assert [settings.variables(i)["CUDA_VISIBLE_DEVICES"] for i in (0, 1)] == ["1,2", "3,4"]


def test_several_engines_on_a_gpu_divide_what_one_would_take(built: Any) -> None:
    two = ("generator.engines_per_gpu=2", "services.generator.num_replicas=2", "grpo.beta=0")
    settings = built(*two, gpus=("1", "2", "3"))
    assert settings.gpus == (("1",), ("1",), ("2",), ("2",))
    assert [settings.arguments(i, Path("w"))["gpu_memory_utilization"] for i in range(4)] == [OWN_MEMORY / 2] * 4
    shared = built("generator.engines_per_gpu=2", gpus=ONE)
    assert (shared.gpus, shared.memory_share) == ((ONE, ONE), SHARED_MEMORY / 2)
    assert built("generator.engines_per_gpu=2", gpus=()).gpus == ((),), "on the CPU replicas are more engines"
    config = load_config({"generator": {"backend": "vllm"}}, two)
    assert (shard_count(config), shards_at_once(config)) == (8, 16)  # of a batch of 8 groups


@pytest.mark.parametrize(("sharing", "sleeps"), [("sleep", True), ("split", False)])
def test_on_the_trainers_gpu_an_engine_takes_a_part_of_it(built: Any, sharing: str, sleeps: bool) -> None:
    settings = built(f"generator.sharing={sharing}", gpus=ONE)
    args = settings.arguments(0, Path("w"))
    assert (settings.gpus, args["gpu_memory_utilization"]) == ((ONE,), SHARED_MEMORY)
    assert args["enable_sleep_mode"] is sleeps
    assert takes_turns(host(f"generator.sharing={sharing}", gpus=ONE)) is sleeps


@pytest.mark.parametrize("sharing", ["sleep", "split"])
def test_on_a_gpu_of_its_own_an_engine_takes_most_of_it_and_never_sleeps(built: Any, sharing: str) -> None:
    settings = built(f"generator.sharing={sharing}", gpus=("0", "1"))
    args = settings.arguments(0, Path("w"))
    assert (args["gpu_memory_utilization"], args["enable_sleep_mode"]) == (OWN_MEMORY, False)
    assert not takes_turns(host(f"generator.sharing={sharing}", gpus=("0", "1")))


@pytest.mark.parametrize("gpus", [ONE, ("0", "1")])
def test_a_share_that_the_user_gives_holds_on_any_gpu(built: Any, gpus: tuple[str, ...]) -> None:
    settings = built("generator.engine_args.gpu_memory_utilization=0.25", gpus=gpus)
    assert settings.arguments(0, Path("w"))["gpu_memory_utilization"] == 0.25


@pytest.mark.parametrize(("overrides", "gpus"), [([], ()), (["services.generator.with_gpus=false"], ONE)])
def test_on_the_cpu_nothing_is_shared(built: Any, overrides: list[str], gpus: tuple[str, ...]) -> None:
    settings = built(*overrides, "services.generator.num_replicas=2", gpus=gpus)
    assert (settings.on_cpu, settings.sleep, settings.threads) == (True, False, 2)
    assert settings.variables(1)["CUDA_VISIBLE_DEVICES"] == "-1"
    assert not takes_turns(host(*overrides, gpus=gpus))


def test_the_embedded_generator_takes_no_turns() -> None:
    assert not takes_turns(host(gpus=ONE, backend="hf"))


def test_the_rest_of_the_settings_comes_from_the_keys_that_name_it(built: Any) -> None:
    generator = "generator={weight_update: drain, dtype: bfloat16, threads: 5, engine_args: {max_num_seqs: 3}}"
    settings = built(generator, "generator.backend=vllm", "training.seq_len=96", gpus=("0", "1"))
    assert (settings.drain, settings.dtype, settings.threads, settings.max_model_len) == (True, "bfloat16", 5, 96)
    assert settings.arguments(0, Path("w"))["max_num_seqs"] == 3
