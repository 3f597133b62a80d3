"""What ``forge rescore`` has finished. Light: looking at runs imports no engine.

Invariant: batches are finished in order, so those that are listed are the first ones.
"""

from __future__ import annotations

from typing import Any

from forge_core.runs.record import RunRecord
from forge_core.store import Ledger, Store, layout


def rescored_entries(store: Store, run_id: str) -> list[dict[str, Any]]:
    """What came of each batch that was graded again, in order."""
    return [store.read_json(key) for key in store.list(layout.rescored_folder(run_id))]


def finished_batches(store: Store, record: RunRecord) -> int:
    """Batches of a run that are trained, or graded again."""
    if record.flow == "rescore":
        return len(store.list(layout.rescored_folder(record.run_id)))
    return max(0, Ledger(store, record.run_id).head())


def newest_metrics(store: Store, record: RunRecord) -> dict[str, Any]:
    """Metrics of the newest of them; none before the first."""
    key, finished = (layout.rescored if record.flow == "rescore" else layout.ledger), finished_batches(store, record)
    metrics: dict[str, Any] = store.read_json(key(record.run_id, finished - 1))["metrics"] if finished else {}
    return metrics
