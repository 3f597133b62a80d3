"""Seeds of samples: where in the run a sample stands decides its random numbers, and nothing else does."""

from __future__ import annotations

import hashlib


def sample_seed(run_seed: int, batch: int, round: int, group: int, sample: int) -> int:
    """A 63-bit seed from SHA-256 of the five numbers; equal on every machine and version."""
    text = f"forge-sample-seed/1:{run_seed}:{batch}:{round}:{group}:{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
