"""Which versions of a run stand out."""

from __future__ import annotations

from forge_core.store import Ledger


def best_version(ledger: Ledger) -> int | None:
    """The version with the best evaluation reward (the first of equals), or None when none was evaluated."""
    evaluated = [e["metrics"] for e in ledger.entries() if "eval/reward/mean" in e["metrics"]]
    best = max(evaluated, key=lambda m: m["eval/reward/mean"], default=None)
    return None if best is None else int(best["eval/version"])
