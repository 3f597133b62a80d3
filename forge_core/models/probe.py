"""The probe: what weights compute, published beside them so that whoever serves them can compare.

``probe.json`` of a weights folder: ``token_ids``, a few sequences; ``logprobs``, of all but the first token of each, by
the trainer's own parameters at temperature 1; ``dtype``, the coarsest type that they went through. The sequences are
arbitrary: they are the same for all versions of a model, and no token of them is likely, so that every weight counts.

Invariant: an engine serves a version only if its own log-probabilities agree within ``TOLERANCE``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_core.models.errors import WeightsError
from forge_core.models.resolve import read_json

PROBE = "probe.json"
SEQUENCES, TOKENS = 4, 32

# Mean |difference| in nats. float32: engines agree to about 1e-5, and one step of training moves more than 1e-4.
# bfloat16: for tokens this unlikely two kernels differ by 0.08 (SmolLM2-135M); less than one step moves, so this finds
# a wrong, half-loaded or long outdated model, not one that is a step old. tensorfloat32 (what attention kernels make of
# float32 on a GPU) rounds an eighth as coarsely as bfloat16, float8 eight times as coarsely.
TOLERANCE = {"float32": 1e-4, "tensorfloat32": 0.03, "bfloat16": 0.25, "float8": 1.0}


class ProbeFailed(WeightsError):
    """An engine does not compute what the trainer published."""


def coarsest(*dtypes: str) -> str:
    """The type among ``dtypes`` that rounds most."""
    return max(dtypes, key=lambda dtype: TOLERANCE[dtype])


def sequences(vocab_size: int, longest: int) -> list[list[int]]:
    """The probe's tokens for a model of ``vocab_size`` tokens; ``longest``: how many a sequence may have."""
    length = min(TOKENS, longest)
    return [[_scattered(row * TOKENS + t) % vocab_size for t in range(length)] for row in range(SEQUENCES)]


def write(folder: Path, token_ids: list[list[int]], logprobs: list[list[float]], dtype: str) -> None:
    (folder / PROBE).write_text(json.dumps({"token_ids": token_ids, "logprobs": logprobs, "dtype": dtype}))


def read(folder: Path) -> dict[str, Any] | None:
    """The probe of a weights folder; None where nobody computed one (a pretrained model that nothing has trained)."""
    path = folder / PROBE
    return read_json(path) if path.exists() else None


def check(probe: dict[str, Any], found: Sequence[Sequence[float]], dtype: str, version: int) -> None:
    """Raise ProbeFailed unless ``found``, the log-probabilities of ``probe["token_ids"]`` by an engine that computes in
    ``dtype``, are the trainer's. An engine may have stopped short of the end of a sequence."""
    pairs = [
        pair
        for ours, theirs in zip(found, probe["logprobs"], strict=True)
        for pair in zip(ours, theirs[: len(ours)], strict=True)
    ]
    mean = sum(abs(a - b) for a, b in pairs) / max(len(pairs), 1)
    allowed = TOLERANCE[coarsest(dtype, probe["dtype"])]
    if not mean <= allowed:  # nor if it is no number
        raise ProbeFailed(
            f"log-probabilities of the probe of version {version} differ from the trainer's by {mean:.3g} on average "
            f"(allowed: {allowed}): what the engine has loaded is not what the trainer published"
        )


def _scattered(n: int) -> int:
    """An arbitrary number, by Knuth's multiplicative hash."""
    return (n + 1) * 2654435761 % 2**32 >> 5
