"""Whether a run has nothing left to do. Light: looking at runs imports no engine.

Invariant: it is a function of the run's configuration and ledger alone, so a resumed run ends where an uninterrupted
one does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from forge_core.config.sft_config import SftConfig
from forge_core.runs.record import RunRecord
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


def is_finished(store: Store, record: RunRecord) -> bool:
    """Whether a run has nothing left to do: all of its steps are taken, or a supervised one has ended early."""
    ledger = Ledger(store, record.run_id)
    if ledger.head() >= record.config.steps:
        return True
    config = record.config
    return isinstance(config, SftConfig) and ends_early(config, validation_losses(ledger.entries()))
