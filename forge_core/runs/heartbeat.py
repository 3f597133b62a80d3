"""Signs of life of the processes that work on one run, through the store alone.

Invariants:
- A heartbeat is advice: nothing that a run guarantees rests on it, and a store that cannot be written to for a while
  never ends the work.
- Ages are measured on the observer's own monotonic clock, from when *it* first saw what it sees now: clocks of two
  machines are never compared.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any

from forge_core.stop import Stopped
from forge_core.store import NotFound, Store, StoreError, layout

log = logging.getLogger("forge")


class Heartbeat:
    """Context manager: while it is open, ``workers/<name>.json`` changes every ``every_s`` seconds.

    It says what the process does (``doing``) and how many objects it has made (``made``); ``ended`` is true at the end,
    and ``failed`` where an error ended it that was no wish to stop.
    """

    def __init__(self, store: Store, run_id: str, role: str, name: str, *, every_s: float) -> None:
        self._store, self._key, self._every_s = store, layout.worker(run_id, name), every_s
        self._about = {"role": role, "name": name, "host": os.uname().nodename, "pid": os.getpid()}
        self._beats, self._made, self._doing, self._failed = 0, 0, "starting", False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"forge-heartbeat-{name}", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = error is not None and not isinstance(error, Stopped | KeyboardInterrupt)
        self._end.set()
        self._thread.join(self._every_s)

    def made(self) -> None:
        """One more object is in the store."""
        self._made += 1

    def doing(self, what: str) -> None:
        """Say what this process does now; told with the next beat."""
        self._doing = what

    def _run(self) -> None:
        while not self._end.is_set():
            self._beat(ended=False)
            self._end.wait(self._every_s)
        self._beat(ended=True)

    def _beat(self, *, ended: bool) -> None:
        self._beats += 1
        body = {**self._about, "beat": self._beats, "made": self._made, "doing": self._doing, "ended": ended,
                "failed": ended and self._failed, "every_s": self._every_s}  # fmt: skip
        try:
            self._store.put_json(self._key, body)
        except (StoreError, OSError) as outage:  # the work itself will say so, if it is more than a moment
            log.debug("no heartbeat: %s", outage)


def read_heartbeat(store: Store, run_id: str, name: str) -> dict[str, Any] | None:
    """The newest beat of the process ``name``; None before its first."""
    try:
        return store.read_json(layout.worker(run_id, name))
    except NotFound:
        return None


def declare_ended(store: Store, run_id: str, name: str) -> None:
    """Say in place of the process ``name``, which is gone, that it has ended: its claims are free at once. Where it
    lives after all, its next beat says so."""
    beat = read_heartbeat(store, run_id, name)
    if beat is not None and not beat["ended"]:
        store.put_json(layout.worker(run_id, name), {**beat, "ended": True, "failed": True})


class Unchanged:
    """For how many seconds each of several things has looked the same, on this process's clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Hashable, tuple[Any, float]] = {}

    def seconds(self, name: Hashable, value: Any) -> float:
        """Seconds since ``name`` was first seen with this ``value``; 0 at a change."""
        before, since = self._seen.get(name, (None, None))
        if since is None or before != value:
            since = self._clock()
            self._seen[name] = (value, since)
        return self._clock() - since
