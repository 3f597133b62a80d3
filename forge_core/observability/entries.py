"""What whoever reads a run's stored objects needs to know: who makes them, when, and which evaluations entries hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

STAGES = {"episodes": "generator", "rewards": "scorer", "reference": "reference"}  # kind of shard -> role


def seconds(text: str) -> float:
    """ISO 8601 as seconds since 1970."""
    return datetime.fromisoformat(text).timestamp()


def finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def held_out(entries: Sequence[Mapping[str, Any]]) -> list[tuple[int, float, float, float]]:
    """Version, mean reward and bounds of its interval, of each evaluation in the ledger."""
    found: dict[int, tuple[float, float, float]] = {}
    for entry in entries:
        for prefix in ("eval/before/", "eval/"):
            known = entry["metrics"]
            mean = known.get(f"{prefix}reward/mean")
            if finite(mean):
                version = int(known.get(f"{prefix}version", entry["version_in"]))
                found[version] = (mean, known.get(f"{prefix}reward/low", mean), known.get(f"{prefix}reward/high", mean))
    return [(version, *found[version]) for version in sorted(found)]
