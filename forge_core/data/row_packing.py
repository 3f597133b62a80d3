"""Documents into rows of equal length, several to a row.

Guarantees:
- ``arrange`` is a pure function of its arguments; every document lies whole in one row.
- Documents are placed longest first, each where it leaves the least room (best fit decreasing: no row is opened while
  another has room). Within a row they keep their order.
- A document of n tokens makes n - 1 predictions, so it occupies n - 1 positions: its last token is only a target.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_core.data.cursor import permutation
from forge_core.data.encoding import Document

PAD_ID = 0  # any token will do: padding is masked, and no document attends to it


@dataclass(frozen=True)
class PackedRow:
    """One training row; all arrays are ``[seq_len]``. A document of n tokens occupies n - 1 positions."""

    input_ids: np.ndarray  # int32
    target_ids: np.ndarray  # int32: the token after input_ids[t] in its document
    target_mask: np.ndarray  # bool: whether predicting target_ids[t] counts in the loss
    positions: np.ndarray  # int32: position within the document, from 0
    document_ids: np.ndarray  # int32: which document of the row, from 0; -1: padding


def arrange(lengths: Sequence[int], seq_len: int, seed: int, window: int) -> list[list[int]]:
    """Rows as indices of documents of these ``lengths`` (positions, 1 to ``seq_len``).

    ``seed`` and ``window`` decide the order of the rows: as they are packed, the longest documents would come first.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (positions left, row), sorted
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(room, (lengths[index], 0))
        if place == len(room):
            rows.append([])
            left, row = seq_len, len(rows) - 1
        else:
            left, row = room.pop(place)
        rows[row].append(index)
        insort(room, (left - lengths[index], row))
    order = permutation(len(rows), seed, f"rows:{window}")
    return [sorted(rows[i]) for i in order]


def build_row(documents: Sequence[Document], seq_len: int) -> PackedRow:
    """The arrays of one row."""
    lengths = [len(document.tokens) - 1 for document in documents]

    def column(parts: Sequence[np.ndarray], dtype: type, fill: int = 0) -> np.ndarray:
        whole: np.ndarray = np.full(seq_len, fill, dtype)
        whole[: sum(lengths)] = np.concatenate(parts)
        return whole

    return PackedRow(
        input_ids=column([document.tokens[:-1] for document in documents], np.int32, PAD_ID),
        target_ids=column([document.tokens[1:] for document in documents], np.int32, PAD_ID),
        target_mask=column([document.mask[1:] for document in documents], np.bool_),
        positions=column([np.arange(n) for n in lengths], np.int32),
        document_ids=column([np.full(n, i) for i, n in enumerate(lengths)], np.int32, -1),
    )
