"""Durations that a tracer records."""

from __future__ import annotations

import asyncio
import time

import pytest

from forge_core.observability.metrics import collecting, drained
from forge_core.observability.reductions import reduce_metrics_states
from forge_core.observability.tracing import Tracer, trace


def recorded(work) -> dict[str, float]:
    with collecting() as collector:
        work()
    return {one.key: one.value for one in reduce_metrics_states(drained(collector).values())}


def test_steps_and_the_whole_are_recorded_as_mean_and_maximum():
    def work() -> None:
        for pause in (0.01, 0.03):
            tracer.start()
            time.sleep(pause)
            tracer.step("read")
            tracer.stop()

    tracer = Tracer("loop")
    found = recorded(work)
    assert found.keys() == {
        *("loop/read/duration_avg_s", "loop/read/duration_max_s", "loop/total_duration_avg_s"),
        "loop/total_duration_max_s",
    }
    assert 0.02 <= found["loop/read/duration_avg_s"] <= found["loop/read/duration_max_s"]
    assert found["loop/total_duration_max_s"] >= 0.03


@pytest.mark.parametrize("timer", ["cpu", "gpu"])
def test_functions_coroutines_and_blocks_are_traced(timer):
    @trace("plain", timer=timer)
    def plain(value: int) -> int:
        return value + 1

    @trace("waiting", timer=timer)
    async def waiting() -> int:
        await asyncio.sleep(0.2)
        return 2

    async def both() -> list[int]:
        return list(await asyncio.gather(waiting(), waiting()))

    def work() -> None:
        assert plain(1) == 2
        began = time.monotonic()
        assert asyncio.run(both()) == [2, 2]
        assert time.monotonic() - began < 0.38, "the second does not wait for the first"
        with pytest.raises(KeyError), trace("block", timer=timer):
            raise KeyError

    found = recorded(work)
    assert found["waiting/total_duration_avg_s"] >= 0.2
    assert {"plain/total_duration_avg_s", "block/total_duration_avg_s"} <= found.keys()


def test_misuse_is_an_error():
    tracer = Tracer("t")
    with pytest.raises(ValueError, match="after start"):
        tracer.step("s")
    with pytest.raises(ValueError, match="after start"):
        tracer.stop()
    tracer.start()
    with pytest.raises(ValueError, match="has started"):
        tracer.start()
    with pytest.raises(ValueError, match="'cpu' or 'gpu'"):
        Tracer("t", timer="sundial")  # type: ignore[arg-type]


def test_performance_metrics_can_be_turned_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DISABLE_PERF_METRICS", "true")

    def work() -> None:
        with trace("off") as tracer:
            tracer.step("s")

    assert recorded(work) == {}


@pytest.mark.engine  # imports torch
def test_memory_of_a_gpu_is_what_is_left_and_the_peak_and_a_nested_trace_leaves_it_to_the_outer_one():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    kept = []

    def work() -> None:
        with trace("outer", track_memory=True, timer="gpu"), trace("inner", track_memory=True, timer="gpu"):
            kept.append(torch.empty(250_000_000, device="cuda"))  # 1 GB
            del [torch.empty(500_000_000, device="cuda")][0]  # 2 GB, for a moment
        torch.cuda.synchronize()

    before = torch.cuda.memory_allocated() / 1e9
    found = recorded(work)
    assert found["outer/memory_delta_end_start_avg_gb"] == pytest.approx(1.0, abs=0.01)
    assert found["outer/memory_peak_max_gb"] == pytest.approx(before + 3.0, abs=0.01)
    assert not [key for key in found if key.startswith("inner/memory")]
    assert found["inner/total_duration_avg_s"] > 0
