"""Metrics of a step's grading, from what the reward objects record: throughput, failures, seconds and costs by reward.

Counts, seconds and costs are added up over shards; shares and rates are means. What depends on the machine is below
``time/``, as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_core.runs.context import RunContext

_MEANS = ("accuracy", "prior", "grades_per_second")


def grading_metrics(ctx: RunContext, prefixes: Sequence[str]) -> dict[str, float]:
    """``time/grades_per_second`` and, for each reward, ``time/grade/<name>`` (seconds), ``reward/<name>/failed`` and
    what else it counts."""
    manifests = [ctx.shards.open_published(prefix).manifest for prefix in prefixes]
    recorded = [(manifest.provenance or {}).get("grading", {}) for manifest in manifests]
    found: dict[str, list[float]] = {}
    for name, value in (pair for one in recorded for pair in one.items()):
        found.setdefault(name, []).append(value)
    return {_key(name): fmean(v) if name.endswith(_MEANS) else sum(v) for name, v in sorted(found.items())}


def _key(name: str) -> str:
    if name.endswith("/seconds"):
        return f"time/grade/{name.removesuffix('/seconds')}"
    return f"time/{name}" if name == "grades_per_second" else f"reward/{name}"
