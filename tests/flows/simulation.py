"""A plain executor with a fake clock, for the properties of the staleness window.

Tasks start when their dependencies are done and their engine is free, take a given time, and end in order of the
clock. A task whose dependency failed ends ``NotReady``, as Prefect's do.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class State:
    name: str

    def is_completed(self) -> bool:
        return self.name == "Completed"


class SimFuture:
    def __init__(self) -> None:
        self.state = State("Pending")
        self.value: Any = None
        self.error: BaseException | None = None
        self.callbacks: list[Callable[[Any], None]] = []

    def wait(self, timeout: float | None = None) -> None:
        assert self.state.name != "Pending"

    def result(self) -> Any:
        if self.error:
            raise self.error
        return self.value

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        self.callbacks.append(fn)

    def settle(self, name: str, value: Any = None, error: BaseException | None = None) -> None:
        self.state, self.value, self.error = State(name), value, error
        for fn in self.callbacks:
            fn(self)


@dataclass
class Job:
    task: SimTask
    args: tuple[Any, ...]
    future: SimFuture
    waits: list[SimFuture]
    priority: tuple[int, int]


@dataclass
class Executor:
    """``engines`` maps an engine's name to how many tasks it runs at once."""

    engines: dict[str, int]
    clock: float = 0.0
    waiting: list[Job] = field(default_factory=list)
    busy: dict[str, int] = field(default_factory=dict)
    events: list[tuple[float, int, Job, Any, BaseException | None]] = field(default_factory=list)
    order: Iterable[int] = field(default_factory=itertools.count)

    def submit(self, task: SimTask, args: tuple[Any, ...], wait_for: Iterable[SimFuture]) -> SimFuture:
        waits = [*futures_in(args), *wait_for]
        job = Job(task, args, SimFuture(), waits, (args[1], next(self.order)))  # type: ignore[call-overload]
        self.waiting.append(job)
        self._start_ready()
        return job.future

    def advance(self) -> None:
        """Move the clock to the next task's end. Nothing left to end while somebody waits is a deadlock."""
        assert self.events, "deadlock: nothing is running and nothing can start"
        self.clock, _, job, value, error = heapq.heappop(self.events)
        self.busy[job.task.engine] -= 1
        if error is None:
            job.future.settle("Completed", value)
        else:
            job.future.settle("Failed", error=error)
        self._start_ready()

    def _start_ready(self) -> None:
        for job in sorted(self.waiting, key=lambda j: j.priority):
            done = [f.state.name for f in job.waits]
            if any(name in ("Failed", "NotReady") for name in done):
                self.waiting.remove(job)
                job.future.settle("NotReady", error=RuntimeError("UnfinishedRun"))
                return self._start_ready()
            if all(name == "Completed" for name in done) and self._free(job.task.engine):
                self._start(job)
        return None

    def _free(self, engine: str) -> bool:
        return self.busy.get(engine, 0) < self.engines[engine]

    def _start(self, job: Job) -> None:
        self.waiting.remove(job)
        engine = job.task.engine
        self.busy[engine] = self.busy.get(engine, 0) + 1
        begun = job.task.begin(*resolved(job.args))
        value, error = None, None
        seconds = job.task.seconds(job.args)
        try:
            value = job.task.end(begun)
        except Exception as failure:
            error = failure
        heapq.heappush(self.events, (self.clock + seconds, next(self.order), job, value, error))  # type: ignore[call-overload]


@dataclass
class SimTask:
    """``begin`` runs when the task starts (it reads the world); ``end`` gives its value or raises.

    The value becomes visible when the task's time is over.
    """

    executor: Executor
    engine: str
    seconds: Callable[[tuple[Any, ...]], float]
    begin: Callable[..., Any]
    end: Callable[[Any], Any] = lambda begun: begun

    def submit(self, *args: Any, wait_for: Iterable[SimFuture] = ()) -> SimFuture:
        return self.executor.submit(self, args, wait_for)


def futures_in(value: Any) -> list[SimFuture]:
    if isinstance(value, SimFuture):
        return [value]
    if isinstance(value, list | tuple):
        return [f for item in value for f in futures_in(item)]
    return []


def resolved(value: Any) -> Any:
    if isinstance(value, SimFuture):
        return value.result()
    if isinstance(value, list | tuple):
        return type(value)(resolved(item) for item in value)
    return value
