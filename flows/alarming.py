"""Alarms while a run goes on: a line on the console and an event ``forge.alarm.<name>`` on the Prefect server.

Invariants:
- An alarm stops nothing and delays nothing: rules cost microseconds, and events are sent in the background.
- What the steps of a run raise is told by the process that commits them, once: a resumed run does not repeat what was
  raised before. That nothing new is stored is noticed by a thread of a process that waits: the flow of a run in one
  process, or the coordinator.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import copy_context
from typing import Any

from prefect.events import emit_event

from forge_core.observability.alarms import Alarm, Alarms, first_trained, silence
from forge_core.observability.best_effort import BestEffort
from forge_core.report.watching import Watched
from forge_core.runs.context import RunContext
from forge_core.runs.record import now
from forge_core.store import StoreError

log = logging.getLogger("forge")
LOOKS = 10  # at the store, in the time after which a run is silent
LONGEST_LOOK_S = 60.0


class Alarming:
    """The alarms of one run in this process; ``note`` tells a person. ``close`` it in the end."""

    def __init__(self, context: RunContext, note: Callable[[str], None]) -> None:
        self._ctx, self._note = context, note
        self._rules = Alarms(context.config.alarms)
        self._events = BestEffort(limit_s=30.0, name="alarms")
        self._context = copy_context()  # an event is related to the flow run of its context
        self._closed = threading.Event()

    def begin(self, entries: Iterable[Mapping[str, Any]] | None = None) -> None:
        """Tell what steps raise from here on; ``entries``: all that are committed (left out: those needed are read)."""
        for entry in self._committed() if entries is None else entries:
            self._rules.after(entry)
        self._ctx.observers.append(self.step)

    def step(self, entry: dict[str, Any]) -> None:
        """A training step was committed."""
        for alarm in self._rules.after(entry):
            self.tell(alarm)

    def watch_silence(self) -> None:
        """Tell from here on when nothing new of the run is stored."""
        if self._ctx.config.alarms.silent_minutes is not None:
            threading.Thread(target=self._watch, name="forge-silence", daemon=True).start()

    def tell(self, alarm: Alarm) -> None:
        self._note(f"alarm after step {alarm.step}: {alarm.message}")
        self._events.submit(self._context.copy().run, emit, self._ctx.run_id, self._ctx.store.uri, alarm)

    def close(self) -> None:
        self._closed.set()
        self._events.close(5.0)

    def _committed(self) -> Iterable[Mapping[str, Any]]:
        ledger = self._ctx.ledger
        head = max(0, ledger.head())
        newest = max(0, head - self._rules.needs)
        yield from first_trained(ledger.required, newest)
        yield from map(ledger.required, range(newest, head))

    def _watch(self) -> None:
        minutes = self._ctx.config.alarms.silent_minutes
        assert minutes is not None
        watched: Watched | None = None
        begun, told = time.monotonic(), False
        while not self._closed.wait(min(LONGEST_LOOK_S, 60.0 * minutes / LOOKS)):
            try:
                watched = watched or Watched(self._ctx.store, self._ctx.run_id)
                version, age_s = watched.silence()
            except (StoreError, OSError) as outage:
                log.warning("cannot look whether the run is silent: %s", outage)
                continue
            # What happened before this process began was not its silence.
            silent_s = min(age_s or 0.0, time.monotonic() - begun)
            silent = silent_s > 60.0 * minutes
            if silent and not told:
                self.tell(silence(max(0, version), now(), silent_s, 60.0 * minutes))
            told = silent


def emit(run_id: str, store: str, alarm: Alarm) -> None:
    """The event of an alarm."""
    resource = {"prefect.resource.id": f"forge.run.{run_id}", "prefect.resource.name": run_id}
    emit_event(f"forge.alarm.{alarm.name}", resource=resource, payload={"store": store, **alarm.payload()})
