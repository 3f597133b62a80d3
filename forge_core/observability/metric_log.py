"""The metrics of one process of a run: into the store after each commit, and from there to the backends.

Invariants:
- Training waits for none of this: each backend, and the store's file, has a thread of its own with a bounded queue.
- A backend reads what it shows from the rows that the store has: one that was slow, failed or was not there goes on
  where it stopped, also in the next process, and misses no step that has rows.
- A step whose rows cannot be made, since stored objects are damaged, is skipped with a warning; the next process tries
  it again. A store that does not answer is waited for: it is about no step.
- The first failure of each is said at once, as a warning; the run goes on.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from forge_core.config.any_config import AnyConfig
from forge_core.config.metric_sections import BackendSection
from forge_core.data_model import METRICS, from_parquet
from forge_core.observability.backends import Backend, Origin, get_logger_backend_class
from forge_core.observability.best_effort import BestEffort
from forge_core.observability.metrics import LoggingMode, Metric, disabled, streaming
from forge_core.observability.step_rows import Row, by_source, whole
from forge_core.observability.stored_metrics import StoredMetrics
from forge_core.store import Ledger, NotFound, Opener, Store, StoreError, digest, layout

log = logging.getLogger("forge")
LIMIT_S = 60.0  # of one call of a backend, after which further ones wait for the next step
CLOSE_S = 30.0
KEPT = 8  # newest steps whose rows stay in memory


class MetricLog:
    """``role``: of a process that does a part of the run; None: of the one that trains (alone, or as that role).
    ``shards`` opens what the steps consumed."""

    def __init__(
        self, store: Store, run_id: str, created_at: str, config: AnyConfig, role: str | None, shards: Opener
    ) -> None:
        self._store, self._run_id, self._shards = store, run_id, shards
        self._section = config.metric_logging
        role = "" if role in (None, "trainer") else str(role)
        name = f"{run_id}-{digest([run_id, created_at])[:8]}"
        self._origin = Origin(run_id, name, role, config.model_dump(mode="json"))
        self._rows: OrderedDict[int, list[Row]] = OrderedDict()
        self._stored: StoredMetrics | None = None
        self._missing: deque[int] = deque()  # committed steps without a file
        self._next = 0  # the first step after those that were looked at
        self._writer: BestEffort | None = None
        self._feeds: list[_Feed] | None = None
        self._streams = ExitStack()

    def open(self) -> None:
        """Begin: write what an earlier process has not, and show what is recorded from here on. Idempotent."""
        if self._feeds is not None:
            return
        backends = [] if disabled() else list(self._section.backends)
        self._feeds = [_Feed(name, section, self._origin, self.rows) for name, section in backends]
        for feed in self._feeds:
            if feed.streams:
                self._streams.enter_context(streaming(feed.stream))
        if not self._origin.role:
            self._writer = BestEffort(LIMIT_S, name="metrics")
            self._writer.submit(self._catch_up)

    def commit(self, entry: Mapping[str, Any]) -> None:
        """A training step was committed; returns at once."""
        if "version_out" in entry and not self._origin.role:  # grading again commits no step
            self.open()
            assert self._writer is not None
            self._writer.submit(self._catch_up, entry["version_out"])

    def rows(self, step: int) -> list[Row]:
        """The rows of a committed step. Raises StoreError."""
        key = layout.metrics(self._run_id, step)
        return self._rows.get(step) or from_parquet(self._store.read(key), METRICS, key)

    def close(self) -> None:
        """Finish what is under way, within ``CLOSE_S`` seconds each."""
        self._streams.close()
        if self._writer is not None and not self._writer.close(CLOSE_S):
            log.warning("metrics of %s are not all stored: the next process that trains it adds them", self._run_id)
        for feed in self._feeds or []:
            feed.close()
        self._feeds = self._writer = None

    def _catch_up(self, head: int | None = None) -> None:
        """Write every step before version ``head`` that has no file, and tell the backends."""
        if self._stored is None:
            stored = StoredMetrics(self._store, self._run_id, self._shards)
            head = max(0, Ledger(self._store, self._run_id).head()) if head is None else head
            self._missing.extend(stored.missing(head))
            self._stored, self._next = stored, head
        self._missing.extend(range(self._next, head or 0))
        self._next = max(self._next, head or 0)
        while self._missing:
            self._write(self._stored, self._missing[0])
            self._missing.popleft()  # now that it is there, or never will be
        for feed in self._feeds or []:
            feed.submit(self._next)

    def _write(self, stored: StoredMetrics, step: int) -> None:
        """Store the rows of ``step``, if they can be made. Raises what a store raises that cannot be asked."""
        try:
            self._rows[step] = stored.write(step)
        except Exception as error:
            if isinstance(error, OSError) or type(error) is StoreError:
                raise
            log.warning("step %d of %s has no metrics, the run goes on: %r", step, self._run_id, error)
        while len(self._rows) > KEPT:
            self._rows.popitem(last=False)


class _Feed:
    """One backend, in a thread of its own."""

    def __init__(self, name: str, section: BackendSection, origin: Origin, rows: Callable[[int], list[Row]]) -> None:
        self._name, self._section, self._origin, self._read = name, section, origin, rows
        self._mode = LoggingMode(section.logging_mode)
        # What a role that trains nothing has to show is what it records; Prometheus asks every process.
        self.streams = self._mode is LoggingMode.PER_RANK_NO_REDUCE or (name == "prometheus" and bool(origin.role))
        self._backend: Backend | None = None
        self._next: int | None = None
        self._head = 0
        self._warned = False
        self._thread = BestEffort(LIMIT_S, capacity=1024, name=f"metrics-{name}")

    def submit(self, head: int) -> None:
        """Show all steps before version ``head`` that were not shown yet."""
        self._head = head
        self._thread.submit(self._guarded, self._show, head)

    def stream(self, metric: Metric) -> None:
        if isinstance(metric.value, int | float):
            self._thread.submit(self._guarded, self._value, metric)

    def close(self) -> None:
        if self._head:
            self._thread.submit(self._guarded, self._show, self._head)  # what was put off while a call took long
        self._thread.submit(self._guarded, self._end)
        if not self._thread.close(CLOSE_S):
            log.warning("metric_logging.%s did not finish within %.0f s", self._name, CLOSE_S)
        elif self._thread.dropped:
            log.warning("metric_logging.%s was too slow for %d values", self._name, self._thread.dropped)

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception as error:  # whatever a backend raises, the run is not about it
            if not self._warned:
                self._warned = True
                log.warning(
                    "metric_logging.%s failed, the run goes on: %s: %s", self._name, type(error).__name__, error
                )

    def _opened(self) -> Backend:
        if self._backend is None:
            self._backend = get_logger_backend_class(self._name)(self._section, self._origin)
        return self._backend

    def _show(self, head: int) -> None:
        backend = self._opened()
        if self._next is None:
            last = backend.last_step()
            self._next = max(0, head - 1) if last is None else last + 1
        while self._next < head:
            with suppress(NotFound):  # a step that was skipped
                rows = self._read(self._next)
                backend.log(self._next, self._values(rows), _tables(rows))
            self._next += 1

    def _values(self, rows: list[Row]) -> dict[str, float]:
        if self._mode is LoggingMode.PER_RANK_REDUCE:
            return by_source(rows)
        values = whole(rows)
        if self._mode is LoggingMode.PER_RANK_NO_REDUCE:  # these were shown one by one
            recorded = {row["key"] for row in rows if row["count"] is not None}
            return {key: value for key, value in values.items() if key not in recorded}
        return values

    def _value(self, metric: Metric) -> None:
        self._opened().log_value(metric)

    def _end(self) -> None:
        if self._backend is not None:
            self._backend.close()


def _tables(rows: list[Row]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["sample"] is not None:
            found.setdefault(row["key"], []).append(json.loads(row["sample"]))
    return found
