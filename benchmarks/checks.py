"""Whether what a run trained on was right, by its ledger: what must hold before its times mean anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Mean difference of log-probabilities, sampler against trainer, in nats a token.
MISMATCH = {"float32": 1e-3, "bfloat16": 0.25}


def wrong(entries: Iterable[dict[str, Any]], staleness: int, dtype: str) -> list[str]:
    """What does not hold in the ledger entries of a run whose sampler and trainer compute in ``dtype``: no episode is
    more than ``staleness`` steps old, and where one version sampled a response the trainer finds the sampler's
    log-probabilities."""
    found = []
    for entry in entries:
        step, metrics = entry["version_out"], entry["metrics"]
        oldest = max((int(key.rpartition("/")[2]) for key in metrics if key.startswith("age/count/")), default=0)
        if oldest > staleness:
            found.append(f"step {step} trained on episodes {oldest} steps old, allowed are {staleness}")
        gap = metrics.get("mismatch/one_version_mean_abs_logprob", 0.0)
        if not gap <= MISMATCH[dtype]:
            found.append(f"step {step}: log-probabilities differ by {gap:.3g} nats, allowed are {MISMATCH[dtype]}")
    return found
