"""Seeds of samples: where in the run a sample stands decides its random numbers, and nothing else does."""

from __future__ import annotations

import hashlib


def sample_seed(run_seed: int, batch: int, round: int, group: int, sample: int) -> int:
    """A 63-bit seed from SHA-256 of the five numbers; equal on every machine and version."""
    return _seed(f"forge-sample-seed/1:{run_seed}:{batch}:{round}:{group}:{sample}")


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a turn (from 0) of the sample with ``seed``."""
    return _seed(f"forge-turn-seed/1:{seed}:{turn}")


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
