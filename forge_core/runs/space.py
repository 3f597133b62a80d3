"""How much room a run's store has left: measured with each commit, so that the ledger can tell it later.

Invariant: a step waits for a look at the file system at most. A bucket is counted in the background, at most every
``COUNT_S`` seconds, and only where somebody has said how much it takes.
"""

from __future__ import annotations

import shutil
import time

from forge_core.observability.alarms import FREE, STORED
from forge_core.observability.best_effort import BestEffort
from forge_core.store import Store

COUNT_S = 600.0


class Space:
    """``count``: whether objects are counted in a store that is no folder."""

    def __init__(self, store: Store, background: BestEffort, *, count: bool) -> None:
        self._store, self._background, self._count = store, background, count
        self._stored: float | None = None
        self._counted = float("-inf")

    def measured(self) -> dict[str, float]:
        """Metrics of the newest measurement."""
        if self._store.folder is not None:
            return {FREE: float(shutil.disk_usage(self._store.folder).free)}
        if self._count and time.monotonic() - self._counted > COUNT_S:
            self._counted = time.monotonic()
            self._background.submit(self._sum)
        return {} if self._stored is None else {STORED: self._stored}

    def _sum(self) -> None:
        self._stored = float(sum(self._store.sizes("").values()))
