"""Roles on GPUs: nobody is left out, nobody shares by accident, and a refusal says what does fit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core import nvidia_smi
from forge_core.config import ConfigError, RunConfig, load_config
from forge_core.devices import Placement, generator_shape, gpu_ids, place, torch_device, visible_gpus

ALL_TRUE = [f"services.{role}.with_gpus=true" for role in ("generator", "trainer", "ref_model")]


def configured(*overrides: str, backend: str = "vllm") -> RunConfig:
    return load_config({"generator": {"backend": backend}}, overrides)


def ids(count: int) -> tuple[str, ...]:
    return tuple(str(i) for i in range(count))


def refusal(config: RunConfig, gpus: int) -> str:
    with pytest.raises(ConfigError) as caught:
        place(config, ids(gpus))
    return str(caught.value)


def test_without_gpus_everything_is_on_the_cpu():
    several = configured("services.generator.num_replicas=2", "parallelism.data_parallel_shard_degree=4")
    assert place(several, ()) == Placement(((), ()), (), ())


def test_every_role_has_its_own_gpu_where_there_are_enough():
    assert place(configured(*ALL_TRUE), ids(3)) == Placement((("0",),), ("1",), ("2",))
    several = configured(
        "services.generator={num_replicas: 2, procs: 2}",
        "parallelism={tensor_parallel_degree: 2, data_parallel_shard_degree: 2}",
    )
    assert place(several, ids(9)) == Placement((("0", "1"), ("2", "3")), ("4", "5", "6", "7"), ("8",))


def test_the_embedded_generator_takes_one_gpu_whatever_its_service_says():
    config = configured("services.generator={num_replicas: 2, procs: 2}", backend="hf")
    assert place(config, ids(3)).generator == (("0",),)


def test_the_reference_sits_beside_the_trainer_when_no_gpu_is_left():
    assert place(configured(), ids(2)) == Placement((("0",),), ("1",), ("1",))
    assert place(configured("parallelism.tensor_parallel_degree=2"), ids(3)).reference == ("1",)
    assert place(configured("services.ref_model.with_gpus=false"), ids(2)).reference == ()
    assert place(configured("services.trainer.with_gpus=false"), ids(1)).reference == ()


@pytest.mark.parametrize("overrides", [[], ALL_TRUE])
@pytest.mark.parametrize("backend", ["hf", "vllm"])
def test_one_gpu_is_shared_by_all_roles(overrides: list[str], backend: str):
    assert place(configured(*overrides, backend=backend), ("GPU-5",)) == Placement(
        (("GPU-5",),), ("GPU-5",), ("GPU-5",), shared=True
    )


@pytest.mark.parametrize(
    ("overrides", "gpus", "parts"),
    [
        (ALL_TRUE, 0, ["3 are wanted", "has 0", "services.trainer.with_gpus=false"]),
        (["parallelism.data_parallel_shard_degree=2"], 1, ["services.trainer 2", "data_parallel_shard_degree=1"]),
        (["services.generator.num_replicas=4"], 3, ["services.generator 4", "services.generator.num_replicas=2"]),
        (["parallelism={data_parallel_shard_degree: 4, tensor_parallel_degree: 2}"], 5, ["shard_degree=2"]),
        (["services.generator.procs=2", "parallelism.tensor_parallel_degree=2"], 2, ["procs=1", "parallel_degree=1"]),
        (["services.trainer.with_gpus=false", *ALL_TRUE[::2]], 1, ["services.ref_model.with_gpus=null"]),
    ],
)
def test_too_few_gpus_are_refused_with_each_number_and_a_setting_that_fits(overrides, gpus, parts):
    message = refusal(configured(*overrides), gpus)
    assert "not enough GPUs" in message
    for part in parts:
        assert part in message


def test_ranks_are_divided_among_nodes():
    config = configured("parallelism.data_parallel_shard_degree=4", "grpo.beta=0")
    assert place(config, ids(3), nodes=2).trainer == ("1", "2")
    with pytest.raises(ConfigError, match="cannot be divided among 3 nodes"):
        place(config, ids(8), nodes=3)


@st.composite
def configurations(draw: st.DrawFn) -> RunConfig:
    small, wish = st.integers(1, 3), st.sampled_from([True, False, None])
    service = lambda: {"procs": draw(small), "num_replicas": draw(small), "with_gpus": draw(wish)}
    return load_config(
        {
            "generator": {"backend": draw(st.sampled_from(["hf", "vllm"]))},
            "grpo": {"beta": draw(st.sampled_from([0.0, 0.1]))},
            "services": {"generator": service(), "trainer": service(), "ref_model": service()},
            "parallelism": {
                f"{kind}_degree": draw(small)
                for kind in ("tensor_parallel", "pipeline_parallel", "data_parallel_shard")
            },
        }
    )


@settings(deadline=None)
@given(config=configurations(), count=st.integers(0, 12))
def test_every_role_is_placed_without_a_collision_or_the_run_is_refused(config: RunConfig, count: int):
    gpus = ids(count)
    try:
        found = place(config, gpus)
    except ConfigError as error:
        change = str(error).split(": use ")[1].split()
        assert place(load_config(config, change), gpus), "the settings of the message fit"
        return
    assert found == place(config, gpus)
    services, (replicas, procs) = config.services, generator_shape(config)
    generator = [gpu for ids_of_one in found.generator for gpu in ids_of_one]
    assert len(found.generator) == replicas
    assert {len(one) for one in found.generator} <= {0, procs}
    assert_as_wished(services.generator.with_gpus, len(generator), replicas * procs, count)
    ranks = 1
    for degree in config.parallelism.model_dump().values():
        ranks *= degree
    assert_as_wished(services.trainer.with_gpus, len(found.trainer), ranks, count)
    assert len(found.reference) <= (config.grpo.beta > 0)
    for role in (generator, found.trainer, found.reference):
        assert set(role) <= set(gpus)
        assert len(set(role)) == len(role)
    assert found.shared == bool(set(generator) & set(found.trainer))
    assert not found.shared or count == 1
    assert not set(generator) & set(found.reference) - set(found.trainer)


def assert_as_wished(with_gpus: bool | None, has: int, wanted: int, present: int) -> None:
    assert has == (wanted if with_gpus or (with_gpus is None and present) else 0)


@pytest.mark.parametrize(
    ("listed", "count", "found"),
    [
        (None, 2, ("0", "1")),
        ("2,3", 2, ("2", "3")),
        (" GPU-8932f937 , GPU-47ba3c81", 2, ("GPU-8932f937", "GPU-47ba3c81")),
        ("1,nonsense,0", 1, ("1",)),
        ("", 0, ()),
        ("-1", 0, ()),
    ],
)
def test_ids_are_those_of_the_environment_as_far_as_the_driver_follows(listed, count, found):
    assert gpu_ids(listed, count) == found


@pytest.mark.parametrize("hidden", [Placement.environment(()), {"CUDA_VISIBLE_DEVICES": ""}])
def test_a_child_that_was_given_no_gpu_sees_none(hidden: dict[str, str]):
    code = "from forge_core.devices import visible_gpus; print(visible_gpus())"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **hidden}, capture_output=True, text=True)
    assert done.stdout == "()\n", done.stderr


def test_the_environment_of_a_child_names_its_gpus():
    assert Placement.environment(("2", "GPU-5"))["CUDA_VISIBLE_DEVICES"] == "2,GPU-5"


def test_on_rocm_both_variables_name_the_same_gpus(monkeypatch: pytest.MonkeyPatch):
    """vLLM refuses two variables that differ."""
    monkeypatch.setattr("torch.version.hip", "7.0")
    assert Placement.environment(("1",)) == {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}


ONE, TWO = "GPU-1a2b3c4d-0000-0000-0000-000000000001", "GPU-1f2b3c4d-0000-0000-0000-000000000002"


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        ("GPU-1f,GPU-1a2b", (TWO, ONE)),
        (f"{TWO},GPU-1a2b3c4d-0000", (TWO, ONE)),
        ("1,0", ("1", "0")),
        ("MIG-GPU-1a/1/0,MIG-2", ("MIG-GPU-1a/1/0", "MIG-2")),
        ("GPU-9,GPU-1f", ("GPU-9", TWO)),
    ],
)
def test_the_first_characters_of_a_uuid_stand_for_it(
    listed: str, found: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA takes them, vLLM wants all."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\necho {ONE}, H200\necho {TWO}, H200\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    monkeypatch.setattr("forge_core.devices.DRIVERS", ("null",))  # a device that is there
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    # not what another test's driver said
    monkeypatch.setattr(nvidia_smi, "_answered", nvidia_smi._answered.__wrapped__)
    assert visible_gpus() == found
    assert torch_device(found[1]) == "cuda:1"
