"""Durations and GPU memory of what a process does, as metrics.

    with trace("judge/answer"):
        ...

    @trace("judge/answer", track_memory=True, timer="gpu")
    def answer(prompt): ...

    tracer = Tracer("my_loop")
    tracer.start(); load(); tracer.step("load"); run(); tracer.step("run"); tracer.stop()

Recorded are ``<prefix>/<step>/duration_avg_s`` and ``duration_max_s``, ``<prefix>/total_duration_avg_s`` and
``total_duration_max_s``, and with ``track_memory`` ``<prefix>/memory_delta_end_start_avg_gb`` and
``<prefix>/memory_peak_max_gb`` (GB of 10**9 bytes).

Invariants:
- The body's own result and error pass through; a duration is recorded even when it raises.
- ``timer="gpu"`` measures between events of the GPU's queue and waits for it only at the end; without a GPU it is the
  CPU's clock. ``METRIC_TIMER_USES_GPU`` (true, false) decides for all; ``DISABLE_PERF_METRICS=1`` turns all off.
- The peak of memory is the process's: of nested traces that track it, only the outer one does.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar

from forge_core.observability.metrics import record_metric
from forge_core.observability.reductions import Reduce

log = logging.getLogger("forge")
TimerName = Literal["cpu", "gpu"]
F = TypeVar("F", bound=Callable[..., Any])
GB = 1e9
_tracking = threading.local()
_warned: set[str] = set()


class _Timer(Protocol):
    def mark(self, name: str) -> None: ...
    def seconds(self) -> list[tuple[str, float]]: ...


class _CpuTimer:
    """Marks in time; ``seconds`` are those between each and the one before."""

    def __init__(self) -> None:
        self._marks = [("", time.perf_counter())]

    def mark(self, name: str) -> None:
        self._marks.append((name, time.perf_counter()))

    def seconds(self) -> list[tuple[str, float]]:
        return [(name, at - self._marks[i][1]) for i, (name, at) in enumerate(self._marks[1:])]


class _GpuTimer:
    def __init__(self, torch: Any) -> None:
        self._torch, self._marks = torch, [("", self._event(torch))]

    def mark(self, name: str) -> None:
        self._marks.append((name, self._event(self._torch)))

    def seconds(self) -> list[tuple[str, float]]:
        self._marks[-1][1].synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [(name, before.elapsed_time(event) / 1000.0) for (_, before), (name, event) in pairs]

    @staticmethod
    def _event(torch: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Tracer:
    """See the module. One use after the other; each of several threads needs its own. Raises ValueError for a timer
    that does not exist, for ``start`` before ``stop`` and for ``step`` or ``stop`` before ``start``."""

    def __init__(self, prefix: str, track_memory: bool = False, timer: TimerName = "cpu") -> None:
        if timer not in ("cpu", "gpu"):
            raise ValueError(f"timer {timer!r}: use 'cpu' or 'gpu'")
        self.prefix = prefix
        self._track_memory, self._timer_name = track_memory, timer
        self._timer: _Timer | None = None
        self._memory: int | None = None  # bytes at the start, where they are tracked
        self._started = False

    def start(self) -> None:
        if self._started:
            raise ValueError(f"tracer {self.prefix!r} has started: stop it first")
        self._started = True
        if _disabled():
            return
        self._timer = _timer(self._timer_name)
        self._begin_memory()

    def step(self, name: str) -> None:
        """End the step ``name``, which began where the one before ended."""
        self._check("step")
        if self._timer is not None:
            self._timer.mark(name)

    def stop(self) -> None:
        """Record the steps and the whole."""
        self._check("stop")
        timer, self._timer, self._started = self._timer, None, False
        if timer is None:
            return
        timer.mark("")
        durations = timer.seconds()
        for name, seconds in durations[:-1]:
            _record_duration(f"{self.prefix}/{name}/duration", seconds)
        _record_duration(f"{self.prefix}/total_duration", sum(seconds for _, seconds in durations))
        self._end_memory()

    def _check(self, what: str) -> None:
        if not self._started:
            raise ValueError(f"tracer {self.prefix!r}: {what} comes after start")

    def _begin_memory(self) -> None:
        torch = sys.modules.get("torch")
        if not self._track_memory or torch is None or not torch.cuda.is_available():
            return
        if getattr(_tracking, "prefix", None) is not None:
            if self.prefix not in _warned:
                _warned.add(self.prefix)
                log.warning("%s: memory is not tracked inside of %s, which tracks it", self.prefix, _tracking.prefix)
            return
        _tracking.prefix = self.prefix
        torch.cuda.reset_peak_memory_stats()
        self._memory = torch.cuda.memory_allocated()

    def _end_memory(self) -> None:
        if self._memory is None:
            return
        torch, before, self._memory, _tracking.prefix = sys.modules["torch"], self._memory, None, None
        delta, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated()
        record_metric(f"{self.prefix}/memory_delta_end_start_avg_gb", delta / GB, Reduce.MEAN)
        record_metric(f"{self.prefix}/memory_peak_max_gb", peak / GB, Reduce.MAX)


class trace:
    """Context manager and decorator (of functions and coroutine functions) around a ``Tracer``."""

    def __init__(self, prefix: str, track_memory: bool = False, timer: TimerName = "cpu") -> None:
        self._arguments = (prefix, track_memory, timer)
        self._tracer = Tracer(*self._arguments)

    def __enter__(self) -> Tracer:
        self._tracer.start()
        return self._tracer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tracer.stop()

    def __call__(self, function: F) -> F:
        new = functools.partial(trace, *self._arguments)  # each call has its own

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with new():
                return function(*args, **kwargs)

        @functools.wraps(function)
        async def traced_coroutine(*args: Any, **kwargs: Any) -> Any:
            with new():
                return await function(*args, **kwargs)

        return traced_coroutine if inspect.iscoroutinefunction(function) else traced  # type: ignore[return-value]


def _record_duration(name: str, seconds: float) -> None:
    record_metric(f"{name}_avg_s", seconds, Reduce.MEAN)
    record_metric(f"{name}_max_s", seconds, Reduce.MAX)


def _timer(name: TimerName) -> _Timer:
    wish = os.environ.get("METRIC_TIMER_USES_GPU", "").lower()
    on_gpu = name == "gpu" if not wish else wish in ("1", "true")
    torch = sys.modules.get("torch")
    return _GpuTimer(torch) if on_gpu and torch is not None and torch.cuda.is_available() else _CpuTimer()


def _disabled() -> bool:
    return os.environ.get("DISABLE_PERF_METRICS", "").lower() in ("1", "true")
