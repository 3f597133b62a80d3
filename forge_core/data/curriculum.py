"""Prompts from easy to hard.

Guarantees:
- Rows are sorted by the difficulty that a column of the data states, into levels; within one, ties included, the seed
  decides the order.
- The first ``curriculum.epochs`` epochs visit the levels one after the other, each row once; later ones visit all rows
  in any order. So a ``Cursor`` says everything: what was visited, the level, and what comes next.
- Difficulty is a number, or text with one in it (``Level 3``). Rows without any are the hardest.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import groupby, pairwise
from numbers import Real
from typing import Any

from forge_core.config.data_sections import CurriculumSection
from forge_core.data.cursor import Cursor, permutation
from forge_core.data.errors import DataError
from forge_core.data.prompts import PromptSet

# A minus after a word or a bracket is a hyphen (level-3), a full stop after one ends it (No.5); a comma groups digits.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][-+\u2212]?\d+)?"
)
_log = logging.getLogger("forge")


@dataclass(frozen=True)
class Curriculum:
    """``levels``: row numbers, the easiest first; ``epochs``: how many epochs go through them in order."""

    levels: tuple[tuple[int, ...], ...]
    epochs: int

    def order(self, seed: int, epoch: int, shuffle: bool) -> list[int] | None:
        """The rows of ``epoch`` in the order of their visits; None: as without a curriculum."""
        if epoch >= self.epochs:
            return None
        if not shuffle:
            return [row for level in self.levels for row in level]
        mixed = [permutation(len(rows), seed, f"{epoch}:level {i}") for i, rows in enumerate(self.levels)]
        return [rows[i] for rows, order in zip(self.levels, mixed, strict=True) for i in order]

    def level(self, cursor: Cursor) -> int:
        """The level, from 0, of the row that ``cursor`` is before; after the ordered epochs the last."""
        if cursor.epoch >= self.epochs:
            return len(self.levels) - 1
        ends = [sum(map(len, self.levels[: i + 1])) for i in range(len(self.levels))]
        return next(i for i, end in enumerate(ends) if cursor.index < end)

    def reached(self, cursor: Cursor) -> list[int]:
        """The rows of the levels up to that of ``cursor``, in row order."""
        return sorted(row for rows in self.levels[: self.level(cursor) + 1] for row in rows)


def curriculum_of(
    prompts: PromptSet, rows: Sequence[int], section: CurriculumSection | None, key: str = "dataset"
) -> Curriculum | None:
    """The curriculum of ``rows``; None without a section. Raises DataError."""
    if section is None or not rows:
        return None
    values = prompts.column(section.column)
    known = {row: difficulty for row in rows if (difficulty := difficulty_of(values[row])) is not None}
    if not known:
        raise DataError(
            f"{key}.curriculum.column: no row has a number in {section.column!r} (the first has {values[rows[0]]!r}): "
            f"name a column that does; the columns are {', '.join(prompts.columns)}"
        )
    if len(known) < len(rows):
        _log.warning("%s.curriculum: %d rows state no difficulty: they are the hardest", key, len(rows) - len(known))
    sign = -1 if section.descending else 1
    return Curriculum(
        _levels({row: sign * known.get(row, sign * math.inf) for row in rows}, section.levels), section.epochs
    )


def difficulty_of(value: Any) -> float | None:
    """``value`` as a number, where it is one or holds one."""
    if isinstance(value, str):
        found = _NUMBER.search(value)
        value = float(found[0].replace(",", "").replace("\u2212", "-")) if found else None
    if isinstance(value, bool) or not isinstance(value, Real | Decimal) or not math.isfinite(value):
        return None
    return float(value)


def _levels(difficulty: dict[int, float], wanted: int) -> tuple[tuple[int, ...], ...]:
    """One level for each difficulty where these are few; else ``wanted`` levels of nearly equal size."""
    ordered = sorted(difficulty, key=lambda row: (difficulty[row], row))
    ties = [tuple(rows) for _, rows in groupby(ordered, key=difficulty.__getitem__)]
    if len(ties) <= wanted:
        return tuple(ties)
    bounds = [len(ordered) * i // wanted for i in range(wanted + 1)]
    return tuple(tuple(ordered[a:b]) for a, b in pairwise(bounds))
