"""Recording metrics from anywhere: rewards, losses, environments, own flows.

    record_metric("reward/judge/words", len(words))                   # the mean over all values of a training step
    record_metric("reward/judge/calls", 1, Reduce.SUM)
    record_metric("samples/judge", {"prompt": p, "text": t, "reward": r}, Reduce.SAMPLE)

Invariants:
- What is recorded while a stage works on a shard belongs to that shard: it is published with the shard's manifest, and
  the training step merges it. So each value counts exactly once, whatever process recorded it, and whether that process
  lives on or not.
- What is recorded outside of a stage belongs to what its process publishes next.
- Recording never raises for a wrong value, costs microseconds, and is off with ``FORGE_DISABLE_METRICS=1``.
- Standard library only: grading processes import this.
"""

from __future__ import annotations

import contextvars
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from forge_core.observability.reductions import Accumulator, Reduce, State, accumulator

log = logging.getLogger("forge")
ROW_CHARACTERS = 32_768  # of a row of a table, as JSON: rows travel in manifests and ledger entries
KEYS = 1000  # of one collector, at most: a key made of a prompt or an id would fill the store


class LoggingMode(StrEnum):
    """``global_reduce``: one value a step, over all ranks and processes. ``per_rank_reduce``: one for each of them.
    ``per_rank_no_reduce``: every value as it is recorded, by the process that records it."""

    GLOBAL_REDUCE = "global_reduce"
    PER_RANK_REDUCE = "per_rank_reduce"
    PER_RANK_NO_REDUCE = "per_rank_no_reduce"


@dataclass(frozen=True)
class Metric:
    """One recorded value. ``timestamp``: seconds since 1970. ``rank``: of the trainer, where it has several."""

    key: str
    value: Any
    reduction: Reduce = Reduce.MEAN
    timestamp: float = field(default_factory=time.time)
    rank: int = 0


class Collector:
    """The values recorded in one place, reduced as they come. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[int, str], tuple[Reduce, Accumulator]] = {}
        self._warned: set[str] = set()

    def push(self, metric: Metric) -> Metric | None:
        """Take a value, and return it as a plain number or row; None for one that is neither. What cannot be taken is
        left out, with one warning for its key."""
        value, problem = _plain(metric)
        plain = None if problem else replace(metric, value=value)
        problem = problem or self._conflict(metric)
        if problem is None:
            with self._lock:
                new = (metric.reduction, accumulator(metric.reduction))
                self._found.setdefault((metric.rank, metric.key), new)[1].append(value)
        elif metric.key not in self._warned:
            self._warned.add(metric.key)
            log.warning("metric %r is not recorded: %s", metric.key, problem)
        return plain

    def drain(self) -> dict[str, dict[str, State]]:
        """For each rank, the state of each key since the last call, as ``merged`` takes it; plain JSON."""
        with self._lock:
            found, self._found = self._found, {}
        states: dict[str, dict[str, State]] = {}
        for (rank, key), (reduction, kept) in found.items():
            states.setdefault(str(rank), {})[key] = {"reduction": reduction.value, **kept.state()}
        return states

    def take(self, other: Collector) -> None:
        """Take over what ``other`` has. Of a key that both have and reduce in two ways, this one's stays."""
        with other._lock:
            theirs, other._found = other._found, {}
        with self._lock:
            for name, (reduction, kept) in theirs.items():
                own = self._found.setdefault(name, (reduction, accumulator(reduction)))
                if own[0] is reduction:
                    own[1].merge(kept.state())

    def merge(self, states: Mapping[str, Mapping[str, State]]) -> None:
        """Take what ``drain`` gave."""
        with self._lock:
            for rank, key, state in ((r, k, s) for r, own in states.items() for k, s in own.items()):
                reduction = Reduce(state["reduction"])
                self._found.setdefault((int(rank), key), (reduction, accumulator(reduction)))[1].merge(state)

    def _conflict(self, metric: Metric) -> str | None:
        known = self._found.get((metric.rank, metric.key))
        if known is None:
            return None if len(self._found) < KEYS else f"there are {KEYS} keys already: a key must name few things"
        same = known[0] is metric.reduction
        return None if same else f"it was recorded as {known[0].value} before and is {metric.reduction.value} now"


def _plain(metric: Metric) -> tuple[Any, str | None]:
    """The value as it can be stored, or why it cannot."""
    value = metric.value
    try:
        if metric.reduction is not Reduce.SAMPLE:
            return float(value), None
        if not isinstance(value, dict):
            return None, f"{value!r:.200} is no row of a table: give a dict"
        row = json.dumps(value, allow_nan=False, sort_keys=True)
    except Exception as error:  # whatever the value's own type raises
        kind = "its row is not JSON" if metric.reduction is Reduce.SAMPLE else f"{value!r:.200} is not a number"
        return None, f"{kind}: {error}"
    if len(row) > ROW_CHARACTERS:
        return None, f"its row has {len(row)} characters, more than {ROW_CHARACTERS}"
    return json.loads(row), None


_process = Collector()  # what no stage recorded
_current: contextvars.ContextVar[Collector] = contextvars.ContextVar("forge_collector", default=_process)
_streams: list[Callable[[Metric], None]] = []


def record_metric(key: str, value: Any, reduction: Reduce = Reduce.MEAN) -> None:
    """Record ``value`` (a number, or a row of a table for ``SAMPLE``) under ``key``, such as ``reward/judge/words``."""
    if not disabled():
        replay([Metric(key, value, reduction)])


def replay(metrics: Iterable[Metric], rank: int | None = None) -> None:
    """Record here what another process has (``taken``), its values in their order."""
    collector = _current.get()
    for metric in metrics:
        if rank is not None:
            metric = replace(metric, rank=rank)
        if (plain := collector.push(metric)) is not None:
            for stream in _streams:
                stream(plain)


def disabled() -> bool:
    """Whether nothing is recorded in this process."""
    return os.environ.get("FORGE_DISABLE_METRICS", "").lower() in ("1", "true")


@contextmanager
def collecting(*, keep: bool = False) -> Iterator[Collector]:
    """What is recorded in this context, in this thread and where it has work done, goes to the collector. ``keep``:
    what nobody has drained in the end belongs to what this process publishes next."""
    collector = Collector()
    token = _current.set(collector)
    try:
        yield collector
    finally:
        _current.reset(token)
        if keep:
            _process.take(collector)


def drained(collector: Collector | None = None) -> dict[str, dict[str, State]]:
    """The states of ``collector`` (left out: of this context), and of what this process recorded outside of any stage,
    by rank."""
    collector = collector or _current.get()
    if collector is not _process:
        collector.take(_process)
    return collector.drain()


def put_back(states: Mapping[str, Mapping[str, State]]) -> None:
    """Record again what was ``drained`` and could not be published."""
    _current.get().merge(states)


class Outbox:
    """In a process that publishes nothing: keeps what is recorded for the process that asked for the work."""

    def __init__(self) -> None:
        self._kept: list[Metric] = []
        _streams.append(self._kept.append)

    def taken(self) -> list[Metric]:
        """What was recorded since the last call; ``replay`` takes it."""
        _process.drain()
        kept = self._kept.copy()
        del self._kept[: len(kept)]
        return kept


@contextmanager
def streaming(stream: Callable[[Metric], None]) -> Iterator[None]:
    """Hand ``stream`` every value of this process as it is recorded. It must return at once and not raise."""
    _streams.append(stream)
    try:
        yield
    finally:
        _streams.remove(stream)
