"""How much room a run's store has left: measured with each commit, so that the ledger can tell it later.

Invariant: a step waits for a look at the file system at most. A bucket is counted at most every ``COUNT_S`` seconds,
and only where somebody has said how much it takes; in a thread of its own, for that takes minutes, which nothing else
may wait for.
"""

from __future__ import annotations

import shutil
import time

from forge_core.observability.alarms import FREE, STORED
from forge_core.observability.best_effort import BestEffort
from forge_core.store import Store

COUNT_S = 600.0


class Space:
    """``count``: whether objects are counted in a store that is no folder. ``close`` it in the end."""

    def __init__(self, store: Store, *, count: bool) -> None:
        self._store = store
        self._counting = BestEffort(COUNT_S, capacity=1, name="count") if count and store.folder is None else None
        self._stored: float | None = None
        self._counted = float("-inf")

    def measured(self) -> dict[str, float]:
        """Metrics of the newest measurement."""
        if self._store.folder is not None:
            return {FREE: float(shutil.disk_usage(self._store.folder).free)}
        if self._counting and time.monotonic() - self._counted > COUNT_S:
            self._counted = time.monotonic()
            self._counting.submit(self._sum)
        return {} if self._stored is None else {STORED: self._stored}

    def close(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for a count that has begun."""
        if self._counting:
            self._counting.close(timeout)

    def _sum(self) -> None:
        self._stored = float(self._store.total())
