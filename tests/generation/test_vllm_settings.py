"""What the settings of the vLLM generator mean for one engine: its arguments, its environment, its requests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from forge_core.generation.vllm_settings import VLLMSettings
from tests.generation.conftest import request

FOLDER = Path("/weights/3")
TWO_BY_TWO = VLLMSettings(gpus=(("4", "5"), ("6", "7")), dtype="bfloat16", max_model_len=512)
ON_CPU = VLLMSettings(gpus=((), ()), threads=3)


def arguments(settings: VLLMSettings, index: int = 0, **changes: Any) -> dict[str, Any]:
    return dataclasses.replace(settings, **changes).arguments(index, FOLDER)


def test_the_tensor_parallel_degree_of_an_engine_is_the_number_of_its_gpus() -> None:
    for index in (0, 1):
        args = arguments(TWO_BY_TWO, index)
        assert (args["tensor_parallel_size"], args["model"]) == (2, str(FOLDER))
        assert (args["dtype"], args["max_model_len"]) == ("bfloat16", 512)
        assert "enforce_eager" not in args
    uneven = dataclasses.replace(TWO_BY_TWO, gpus=(("0", "1", "2", "3"), ("4",)))
    assert [uneven.arguments(index, FOLDER)["tensor_parallel_size"] for index in (0, 1)] == [4, 1]


@pytest.mark.parametrize(
    ("hip", "names"), [(None, {"CUDA_VISIBLE_DEVICES"}), ("6.4", {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"})]
)
def test_each_engine_sees_its_own_gpus_and_no_others(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, names: set[str]
) -> None:
    monkeypatch.setattr("torch.version.hip", hip)
    for index, ids in enumerate(["4,5", "6,7"]):
        env = TWO_BY_TWO.variables(index)
        assert {name: value for name, value in env.items() if "VISIBLE" in name} == dict.fromkeys(names, ids)
    env = ON_CPU.variables(1)
    assert {name: value for name, value in env.items() if "VISIBLE" in name} == dict.fromkeys(names, "-1")


def test_what_an_engine_on_the_cpu_needs_stays_away_from_gpus() -> None:
    of_cpu = {"VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING", "TORCHDYNAMO_DISABLE"}
    env = ON_CPU.variables(0)
    assert (env["OMP_NUM_THREADS"], env["VLLM_ENABLE_V1_MULTIPROCESSING"]) == ("3", "0")
    assert of_cpu <= set(env)
    assert not of_cpu & set(TWO_BY_TWO.variables(0))
    args = arguments(ON_CPU)
    assert (args["tensor_parallel_size"], args["enforce_eager"], args["enable_chunked_prefill"]) == (1, True, False)
    assert "gpu_memory_utilization" not in args
    compiled = dataclasses.replace(ON_CPU, engine_args={"enforce_eager": False})
    assert compiled.arguments(0, FOLDER)["enforce_eager"] is False
    assert "TORCHDYNAMO_DISABLE" not in compiled.variables(0)


def test_the_users_share_of_a_gpu_goes_before_ours() -> None:
    assert arguments(TWO_BY_TWO)["gpu_memory_utilization"] == 0.9
    assert arguments(TWO_BY_TWO, memory_share=0.4)["gpu_memory_utilization"] == 0.4
    given = {"gpu_memory_utilization": 0.3, "max_num_seqs": 8}
    args = arguments(TWO_BY_TWO, memory_share=0.4, engine_args=given)
    assert (args["gpu_memory_utilization"], args["max_num_seqs"]) == (0.3, 8)


def test_what_forge_decides_goes_before_the_users_arguments() -> None:
    ours = arguments(TWO_BY_TWO)
    defaults = {"gpu_memory_utilization", "worker_extension_cls"}
    theirs = dict.fromkeys(ours.keys() - defaults, "theirs")
    assert arguments(TWO_BY_TWO, engine_args=theirs) == ours


def test_only_an_engine_on_a_gpu_can_sleep() -> None:
    assert arguments(TWO_BY_TWO)["enable_sleep_mode"] is False
    assert arguments(TWO_BY_TWO, sleep=True)["enable_sleep_mode"] is True
    assert arguments(ON_CPU, sleep=True)["enable_sleep_mode"] is False


@pytest.mark.parametrize(
    ("given", "tokenizer", "text"),
    [
        ({}, False, False),
        ({"stop": ["."]}, True, True),
        ({"stop": None, "bad_words": []}, False, False),
        ({"bad_words": ["no"]}, True, False),  # without a tokenizer vLLM looks over them
        ({"structured_outputs": {"regex": "a"}}, True, False),
        ({"stop_token_ids": None}, False, False),
    ],
)
def test_vllm_has_the_tokenizer_where_it_needs_one(given: dict[str, Any], tokenizer: bool, text: bool) -> None:
    settings = dataclasses.replace(TWO_BY_TWO, sampling_params=given)
    assert settings.arguments(0, FOLDER)["skip_tokenizer_init"] is not tokenizer
    params = settings.request("name", request("12"), [1])["params"]
    assert (params["detokenize"], params["stop_token_ids"]) == (text, [1])


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        ({}, "bfloat16"),
        ({"quantization": "fp8"}, "float8"),
        ({"quantization_config": {"linear": "fp8_per_tensor"}}, "float8"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "float8"),
    ],
)
def test_quantization_is_the_coarsest_arithmetic_however_it_is_asked_for(args: dict[str, Any], kind: str) -> None:
    assert dataclasses.replace(TWO_BY_TWO, engine_args=args).arithmetic == kind


def test_an_engine_that_is_told_the_size_of_its_cache_measures_no_memory() -> None:
    stated = {"kv_cache_memory_bytes": 4_000_000_000}
    assert TWO_BY_TWO.measures
    assert not dataclasses.replace(TWO_BY_TWO, engine_args=stated).measures
    assert arguments(TWO_BY_TWO, engine_args=stated)["gpu_memory_utilization"] == 0.01, "else so much must be free"
    both = {**stated, "gpu_memory_utilization": 0.3}
    assert dataclasses.replace(TWO_BY_TWO, engine_args=both).measures, "vLLM looks whether that share is free"
    assert arguments(TWO_BY_TWO, engine_args=both)["gpu_memory_utilization"] == 0.3
    assert not ON_CPU.measures
    assert arguments(TWO_BY_TWO, engine_args=stated)["kv_cache_memory_bytes"] == 4_000_000_000


def test_on_a_cpu_the_size_of_the_cache_that_is_stated_is_the_one_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = dataclasses.replace(ON_CPU, engine_args={"kv_cache_memory_bytes": 4_000_000_000})
    assert ON_CPU.variables(0)["VLLM_CPU_KVCACHE_SPACE"] == "1"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert ON_CPU.variables(0)["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert stated.variables(0)["VLLM_CPU_KVCACHE_SPACE"] is None, "vLLM would follow the variable"
