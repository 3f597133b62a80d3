"""The metrics of a run in the store: ``metrics/<batch>.parquet``, one immutable file for each committed step.

Invariants:
- A file is made by ``put_new`` after its step's commit, from stored objects alone (``step_rows``): whoever makes it,
  and however often it is tried, a step has its rows exactly once.
- A process that died between a commit and the file leaves a gap that the next one closes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge_core.data_model import METRICS, to_parquet
from forge_core.observability.step_rows import Row, Shards, Step, step_rows
from forge_core.store import Ledger, Opener, Store, layout


class StoredMetrics:
    """Writes the metrics of one run; one thread at a time. ``shards`` opens what the steps consumed."""

    def __init__(self, store: Store, run_id: str, shards: Opener) -> None:
        self._store, self._run_id, self._shards = store, run_id, shards
        self._ledger = Ledger(store, run_id)
        self._last: tuple[int, dict[str, Any], Shards] | None = None  # of the step that was read last

    def rows(self, batch: int) -> list[Row]:
        """The rows of the committed step ``batch``. Raises LedgerError when it is not committed, StoreError."""
        before, shards_before = self._step(batch - 1)
        entry, shards = self._step(batch)
        assert shards is not None
        return step_rows(Step(entry, before, shards, shards_before))

    def write(self, batch: int) -> list[Row]:
        """Store the rows of ``batch``, unless that was done; returns them."""
        rows = self.rows(batch)
        self._store.put_new(layout.metrics(self._run_id, batch), to_parquet(rows, METRICS))
        return rows

    def missing(self, head: int) -> Iterator[int]:
        """The steps before version ``head`` that have no file yet."""
        names = {key.rpartition("/")[2] for key in self._store.list(layout.metrics_folder(self._run_id))}
        return (batch for batch in range(head) if f"{layout.number(batch)}.parquet" not in names)

    def _step(self, batch: int) -> tuple[dict[str, Any], Shards | None]:
        if batch < 0:
            return self._ledger.required(batch), None
        if self._last is None or self._last[0] != batch:
            entry = self._ledger.required(batch)
            self._last = (batch, entry, Shards.read(self._shards, entry))
        return self._last[1], self._last[2]
