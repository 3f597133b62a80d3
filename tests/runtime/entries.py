"""Ledger entries of a made-up run, as the displays get them."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

START = datetime(2026, 1, 1, tzinfo=UTC)


def entry(batch: int, **metrics: float) -> dict[str, Any]:
    def at(seconds: float) -> str:
        return (START + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")

    return {
        "batch": batch,
        "version_in": batch,
        "version_out": batch + 1,
        "max_age": min(batch, 1),
        "episodes": {"planned": 64, "trained": 60, "dropped": {"group_too_small": 4}},
        "tokens": 4096,
        "metrics": {"loss": 0.01, "entropy": 1.1, "kl": 2e-5, "grad_norm": 0.4, **metrics},
        "started_at": at(2.0 * batch),
        "finished_at": at(2.0 * batch + 1.5),
    }


def learning_run(steps: int) -> list[dict[str, Any]]:
    """Rewards that rise towards 1, with an evaluation every ten steps."""
    entries = [entry(b, **{"reward/mean": 1 - math.exp(-b / 20)}) for b in range(steps)]
    for e in entries[::10]:
        e["metrics"]["eval/reward/mean"] = e["metrics"]["reward/mean"] + 0.02
    return entries
