"""Where a run is in its prompts, and the rows that come next.

Guarantees:
- Every epoch visits each row once; with ``shuffle`` in an order that is a pure function of seed and epoch.
- A cursor holds everything: going on from a stored one gives the rows that an uninterrupted run would have got.
- A cursor is JSON-able: ``dataclasses.asdict(cursor)`` and ``Cursor(**stored)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from forge_core.data.errors import DataError

if TYPE_CHECKING:
    from forge_core.data.curriculum import Curriculum


@dataclass(frozen=True)
class Cursor:
    """The next row is number ``index`` in the order of ``epoch``."""

    epoch: int = 0
    index: int = 0


def next_rows(
    cursor: Cursor, rows: Sequence[int], seed: int, shuffle: bool, curriculum: Curriculum | None = None
) -> Iterator[tuple[int, Cursor]]:
    """Endless ``(row, cursor after it)`` from ``cursor`` on. ``rows`` are the row numbers of one epoch, ``curriculum``
    is one of the same rows.

    Raises DataError when there are no rows, or fewer than the cursor says were already visited.
    """
    if not rows:
        raise DataError("dataset: no prompt is left to train on: use a larger data set or a smaller eval.holdout")
    if cursor.index >= len(rows):
        raise DataError(f"dataset: {cursor} is past its {len(rows)} rows: the data set changed since the run began")
    return _walk(cursor, rows, seed, shuffle, curriculum)


def _walk(
    cursor: Cursor, rows: Sequence[int], seed: int, shuffle: bool, curriculum: Curriculum | None
) -> Iterator[tuple[int, Cursor]]:
    epoch, index = cursor.epoch, cursor.index
    while True:
        guided = curriculum.order(seed, epoch, shuffle) if curriculum else None
        order = permutation(len(rows), seed, epoch) if shuffle else range(len(rows))
        for position in range(index, len(rows)):
            last = position + 1 == len(rows)
            after = Cursor(epoch + 1, 0) if last else Cursor(epoch, position + 1)
            yield (guided[position] if guided else rows[int(order[position])]), after
        epoch, index = epoch + 1, 0


@lru_cache(maxsize=4)
def permutation(length: int, seed: int, epoch: int | str) -> np.ndarray:
    """An order of ``length`` things that seed and epoch decide. Nobody may change the array.

    Ranks of raw Philox numbers: unlike ``Generator.permutation``, the raw stream is fixed for all NumPy releases.
    """
    key = hashlib.sha256(f"order:{seed}:{epoch}".encode()).digest()[:16]
    return np.argsort(np.random.Philox(key=int.from_bytes(key, "big")).random_raw(length), kind="stable")
