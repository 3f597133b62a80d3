"""Group-relative advantages.

Invariants: equal rewards give exactly 0 for every member (no division, no rounding noise); the standard deviation is
floored, so a deviation that is only rounding can never be blown up; a group needs two rewards or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ROUNDING = 1e-9  # rewards that differ by less, relative to their size, are equal


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ by more than rounding."""
    spread = max(rewards) - min(rewards)
    return spread > ROUNDING * max(1.0, abs(max(rewards)), abs(min(rewards)))


def group_advantages(rewards: Sequence[float], *, normalize: bool = True, eps: float = 1e-4) -> list[float]:
    """Advantages of one group: ``(r - mean) / (std + eps)``, std with ddof 1 (GRPO, arXiv 2402.03300), or
    ``r - mean`` when ``normalize`` is false (Dr. GRPO, arXiv 2503.20783).

    Raises ValueError for a group of fewer than two.
    """
    if len(rewards) < 2:
        raise ValueError("a group advantage needs at least two rewards")
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [r - mean for r in rewards]
    if not normalize:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + eps) for c in centred]
