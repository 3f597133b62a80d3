"""Whether a run has nothing left to do. Light: looking at runs imports no engine.

Invariants:
- It is a function of the run's configuration and of what it has finished alone, so a resumed run ends where an
  uninterrupted one does.
- Entries of the ledger are read only where the configuration has a patience, and each of them once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from forge_core.config.sft_config import SftConfig
from forge_core.runs.record import RunRecord
from forge_core.runs.rescored import finished_batches
from forge_core.runs.versions import VALIDATION
from forge_core.store import Ledger, Store


def ends_early(config: SftConfig, losses: Iterable[float]) -> bool:
    """Whether the newest ``validation.patience`` of the validation ``losses`` are not lower than the best before."""
    if config.validation.patience is None:
        return False
    best, waited = float("inf"), 0
    for loss in losses:
        best, waited = (loss, 0) if loss < best - config.validation.min_delta else (best, waited + 1)
    return waited >= config.validation.patience


def validation_losses(entries: Iterable[Mapping[str, Any]]) -> list[float]:
    """Those that the ledger's entries record."""
    return [entry["metrics"][VALIDATION] for entry in entries if VALIDATION in entry["metrics"]]


class EarlyEnd:
    """``ends_early`` of a ledger that grows."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._read = ledger, 0
        self._losses: list[float] = []

    def reached(self, config: SftConfig) -> bool:
        """Whether the steps that are committed now are enough. Raises StoreError."""
        if config.validation.patience is None:
            return False
        head = max(0, self._ledger.head())
        self._losses += validation_losses([self._ledger.required(batch) for batch in range(self._read, head)])
        self._read = head
        return ends_early(config, self._losses)


def is_finished(store: Store, record: RunRecord) -> bool:
    """Whether a run has nothing left to do: all of its batches are trained or graded again, or a supervised run has
    ended early."""
    if finished_batches(store, record) >= record.config.steps:
        return True
    config = record.config
    return isinstance(config, SftConfig) and EarlyEnd(Ledger(store, record.run_id)).reached(config)
