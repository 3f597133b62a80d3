"""Objects numbered from 0 without a gap: the newest one, found by looking up single keys, never by a listing."""

from __future__ import annotations

from collections.abc import Callable


def newest(exists: Callable[[int], bool], known: int) -> int:
    """The largest number that exists, where ``known`` does: O(log of those added since) look-ups."""
    low, step = known, 1
    while exists(low + step):
        low, step = low + step, step * 2
    high = low + step
    while high - low > 1:  # low exists, high does not
        middle = (low + high) // 2
        low, high = (middle, high) if exists(middle) else (low, middle)
    return low
