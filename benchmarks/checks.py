"""Whether what a run trained on was right, by its ledger: what must hold before its times mean anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

AGE, MISMATCH = "age/count/", "mismatch/one_version_mean_abs_logprob"
CLOSE = {"float32": 1e-3, "bfloat16": 0.25}  # mean difference of log-probabilities, in nats a token
LEARNT = 2e-3  # further, for each step of learning between sampler and trainer, at a learning rate of 1e-6


def wrong(entries: Iterable[dict[str, Any]], staleness: int, dtype: str, learnt: float = LEARNT) -> list[str]:
    """What does not hold in the ledger entries of a run whose sampler and trainer compute in ``dtype``: no episode is
    more than ``staleness`` steps old, and where one version sampled a response the trainer finds the sampler's
    log-probabilities, but for what a step of learning changes (``learnt``, in nats a token)."""
    entries = list(entries)
    known = {key for entry in entries for key in entry["metrics"]}
    found = [f"no step says {key}" for key in (AGE, MISMATCH) if not any(name.startswith(key) for name in known)]
    for entry in entries:
        step, metrics = entry["version_out"], entry["metrics"]
        oldest = max((int(key.removeprefix(AGE)) for key in metrics if key.startswith(AGE)), default=0)
        if oldest > staleness:
            found.append(f"step {step} trained on episodes {oldest} steps old, allowed are {staleness}")
        gap, allowed = metrics.get(MISMATCH, 0.0), CLOSE[dtype] + learnt * oldest
        if not gap <= allowed:
            found.append(f"step {step}: log-probabilities differ by {gap:.3g} nats, allowed are {allowed:.3g}")
    return found
