"""Dividing the documents of an optimizer step among data-parallel ranks.

Guarantees:
- ``share`` is a pure function of its arguments, so every rank computes the same division without a message.
- Every rank gets the same number of micro-batches (those that it lacks are fully masked), as collectives need it.
- One rank gets exactly what ``packing.pack`` gives.

Documents go, longest first, to the rank with the fewest positions so far (ties: the lowest rank).
"""

from __future__ import annotations

from collections.abc import Sequence

from forge_core.data_model import TextTrainBatch
from forge_core.training.packing import Layout, Sample, build, check, empty_layout, lay_out


def share(
    samples: Sequence[Sample], token_budget: int, pad_id: int, seq_len: int, dp: int, *, sizes: int = 0
) -> list[list[TextTrainBatch]]:
    """Per data-parallel rank its micro-batches; ``document_ids`` are indices into the whole of ``samples``.

    Raises ValueError as ``packing.pack``.
    """
    ranks = layouts(samples, token_budget, seq_len, dp, sizes=sizes)
    return [[build(samples, layout, pad_id) for layout in own] for own in ranks]


def layouts(
    samples: Sequence[Sample], token_budget: int, seq_len: int, dp: int, *, sizes: int = 0
) -> list[list[Layout]]:
    """What ``share`` builds: a caller may build one micro-batch while the device works on the one before."""
    check(samples, token_budget, seq_len)
    found = [lay_out(samples, own, token_budget, seq_len, sizes=sizes) for own in _members(samples, dp)]
    count = max(len(own) for own in found)
    like = next((layout for own in found for layout in own), None) if sizes else None
    return [own + [empty_layout(own[0] if own and sizes else like)] * (count - len(own)) for own in found]


def _members(samples: Sequence[Sample], dp: int) -> list[list[int]]:
    """The documents of each rank, in order."""
    ranks: list[list[int]] = [[] for _ in range(dp)]
    load = [0] * dp
    for index in sorted(range(len(samples)), key=lambda i: -len(samples[i].tokens)):
        rank = load.index(min(load))
        ranks[rank].append(index)
        load[rank] += len(samples[index].tokens)
    return [sorted(members) for members in ranks]
