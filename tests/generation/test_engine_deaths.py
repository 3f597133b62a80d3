"""What becomes of requests, versions and the pool when engines die, hang or do not start. The engines are stand-ins,
which fail when they are told to; what real ones do is in test_vllm_generator.py."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forge_core.generation import vllm as vllm_module
from forge_core.generation import vllm_pool, vllm_replica
from forge_core.generation.base import GenerationError
from forge_core.generation.vllm import VLLMGenerator
from forge_core.generation.vllm_settings import VLLMSettings
from forge_core.models.errors import WeightsError
from forge_core.observability.memory import OutOfMemory
from forge_core.processes import ChildGroup
from forge_core.stop import StopToken
from tests.generation.conftest import make_folder, request
from tests.processes.test_group import runs
from tests.weights.objects import until

pytestmark = pytest.mark.engine
Make = Callable[..., VLLMGenerator]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    root = tmp_path_factory.mktemp("versions")
    for version in (0, 1):
        make_folder(root / str(version), seed=version)
    return lambda version: root / str(version)


@pytest.fixture
def make(tmp_path: Path, folders: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes a generator of ``engines`` stand-ins with these faults, one word a start."""

    def child(name: str, command: list[str], **settings: Any) -> ChildGroup:
        return ChildGroup(name, [command[0], "-m", "tests.generation.stand_in", str(tmp_path), command[-1]], **settings)

    def make(faults: str, engines: int = 1, gpus: tuple[tuple[str, ...], ...] = ()) -> VLLMGenerator:
        (tmp_path / "faults").write_text(faults)
        settings = VLLMSettings(gpus=gpus or ((),) * engines, max_model_len=64)
        made.append(VLLMGenerator(folders, version=0, settings=settings, logs=tmp_path))
        return made[-1]

    made: list[VLLMGenerator] = []
    monkeypatch.setattr(vllm_replica, "ChildGroup", child)
    monkeypatch.setattr(vllm_pool, "RETRY_S", 0.01)
    yield make
    for generator in made:
        generator.shutdown()


def starts(folder: Path) -> list[tuple[str, int]]:
    lines = [line.split() for line in (folder / "starts").read_text().splitlines()]
    return [(word, int(pid)) for word, pid in lines]


def reasons(generator: VLLMGenerator, **limits: Any) -> list[Any]:
    """How two requests ended; a call that waits for ever fails."""
    stop = StopToken()
    timer = threading.Timer(30, stop.set, ["the call does not end"])
    timer.start()
    try:
        made = generator.generate([request("12"), request("3", seed=1)], stop=stop, **limits)
    finally:
        timer.cancel()
    return [completion.metadata["finish_reason"] for completion in made]


def test_memory_that_runs_out_while_an_engine_generates_is_named_with_the_settings(make: Make) -> None:
    generator = make("oom")
    with pytest.raises(OutOfMemory, match=r"generator: out of memory, when 2\.00 GiB more") as caught:
        reasons(generator)
    assert "generator.engine_args.max_num_seqs" in str(caught.value)
    assert "vllm-0 died 4 times in a row: RuntimeError: the process of vLLM's engine is gone" in str(caught.value)


def test_what_a_dead_engine_had_is_sampled_by_another_before_there_is_a_new_one(make: Make, tmp_path: Path) -> None:
    generator = make("oom well late", engines=2)
    assert reasons(generator) == ["stop", "stop"]
    until(lambda: len(starts(tmp_path)) == 3)
    assert len(generator._pool.live()) == 1, "the new one waits for the file that lets it start"


def test_a_version_is_served_when_an_engine_has_taken_it(make: Make, tmp_path: Path) -> None:
    generator = make("update update well")
    generator.update_weights(1)
    assert [word for word, _ in starts(tmp_path)] == ["update", "update", "well"]
    assert generator.get_version() == 1
    (replica,) = generator._pool.live().values()
    assert replica.version == 1, "it was started on version 0, and has taken version 1 since"


def test_a_version_that_no_engine_survives_is_not_served(make: Make) -> None:
    generator = make("update")
    with pytest.raises(GenerationError, match="vllm-0 died 4 times in a row"):
        generator.update_weights(1)
    assert generator.get_version() == 0


def test_engines_that_work_but_never_take_new_weights_are_no_endless_loop(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = make("update")
    monkeypatch.setattr(vllm_pool.EnginePool, "_may_start", lambda *_: True)  # as if a request had ended in between
    with pytest.raises(
        WeightsError, match="every engine died while it took version 1, 4 times; version 0 keeps serving"
    ):
        generator.update_weights(1)
    assert reasons(generator) == ["stop", "stop"]


def test_an_engine_that_dies_after_the_deadline_takes_nobody_along(make: Make, tmp_path: Path) -> None:
    generator = make("abort late")
    began = time.monotonic()
    assert reasons(generator, deadline_s=0.3) == ["aborted", "aborted"]
    assert time.monotonic() - began < 5
    until(lambda: len(starts(tmp_path)) == 2)
    (tmp_path / "go").touch()
    assert reasons(generator) == ["stop", "stop"]


def test_an_engine_that_does_not_end_requests_is_ended_itself(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_module, "SILENT_S", 0.5)
    generator = make("silent well")
    assert reasons(generator, deadline_s=0.2) == ["aborted", "aborted"]
    assert "vllm-0 died (it did not end requests within 0 s" in caplog.text
    assert reasons(generator) == ["stop", "stop"]
    assert not runs(starts(tmp_path)[0][1])


@pytest.mark.parametrize(("gpus", "at_first"), [((("0",), ("0",)), 1), ((("0",), ("1",)), 2), (((), ()), 2)])
def test_engines_of_one_gpu_load_one_after_the_other(
    gpus: tuple[tuple[str, ...], ...], at_first: int, make: Make, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(make, "late", gpus=gpus)
        try:
            until(lambda: (tmp_path / "starts").exists() and len(starts(tmp_path)) >= at_first)
            time.sleep(0.5)
            assert len(starts(tmp_path)) == at_first
        finally:
            (tmp_path / "go").touch()
        generator = made.result(30)
    assert len(starts(tmp_path)) == len(generator._pool.live()) == 2
    assert reasons(generator) == ["stop", "stop"]


def test_an_engine_that_waited_for_one_that_cannot_start_is_not_started(make: Make, tmp_path: Path) -> None:
    with pytest.raises(vllm_replica.ReplicaDied, match="no such device"):
        make("start", gpus=(("0",), ("0",)))
    assert len(starts(tmp_path)) == 1


def test_shutdown_ends_an_engine_that_is_being_started(make: Make, tmp_path: Path) -> None:
    generator = make("well late")
    generator._pool.live()[0].group.kill()
    until(lambda: len(starts(tmp_path)) == 2)
    generator.shutdown()
    until(lambda: not runs(starts(tmp_path)[1][1]))
    with pytest.raises(GenerationError, match="was shut down"):
        reasons(generator)


def test_others_get_new_weights_while_an_engine_is_being_started_which_catches_up(make: Make, tmp_path: Path) -> None:
    generator = make("well well late", engines=2)
    generator._pool.live()[0].group.kill()
    until(lambda: len(starts(tmp_path)) == 3)
    generator.update_weights(1)
    assert generator.get_version() == 1
    assert list(generator._pool.live()) == [1]
    (tmp_path / "go").touch()
    until(lambda: len(generator._pool.live()) == 2)
    assert {replica.version for replica in generator._pool.live().values()} == {1}


def test_no_engine_is_started_while_the_gpu_is_another_ones(make: Make, tmp_path: Path) -> None:
    generator = make("well late")
    generator._pool.live()[0].group.kill()
    until(lambda: len(starts(tmp_path)) == 2)
    with ThreadPoolExecutor(1) as pool:
        asleep = pool.submit(generator.sleep)
        time.sleep(0.3)
        assert not asleep.done(), "it has memory of the GPU"
        (tmp_path / "go").touch()
        until(asleep.done)


def test_a_start_that_fails_is_tried_again(make: Make, tmp_path: Path) -> None:
    generator = make("well start start well")
    generator._pool.live()[0].group.kill()
    until(lambda: len(starts(tmp_path)) == 4)
    assert reasons(generator) == ["stop", "stop"]
    assert generator._pool._restarts == [0]


def test_an_engine_that_cannot_start_any_more_breaks_the_pool_with_its_reason(make: Make) -> None:
    generator = make("well start")
    generator._pool.live()[0].group.kill()
    with pytest.raises(GenerationError, match=r"vllm-0 failed to start 4 times in a row: .*no such device"):
        reasons(generator)


def test_the_first_engine_that_cannot_start_ends_the_wait_for_the_others(make: Make, tmp_path: Path) -> None:
    with pytest.raises(vllm_replica.ReplicaDied, match="no such device"):
        make("late start", engines=2)
    assert not [pid for _, pid in starts(tmp_path) if runs(pid) and pid != os.getpid()]
