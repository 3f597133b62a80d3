"""Endless streams of examples: one set, or a weighted mixture of sets and mixtures.

Guarantees:
- ``draw`` gives one global order: a pure function of the data, the settings and the seed.
- Every epoch of a set gives each of its rows once; with ``shuffle`` in an order of its own. A set that is read as a
  whole is shuffled as a whole. A streamed one is shuffled by its shards, then within blocks of ``shuffle_buffer`` rows.
- A mixture takes its next example from a child with the probability of its weight, decided by the number of the draw.
- ``state`` is JSON-able and small: epochs, positions, numbers of draws. A stream that loads it goes on exactly there,
  at any row: a block that was begun is read and shuffled again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from forge_core.data.conversations import Converter, Example
from forge_core.data.cursor import Cursor, next_rows
from forge_core.data.errors import DataError
from forge_core.data.sources import Row

State = dict[str, Any]


@dataclass(frozen=True)
class Drawn:
    """An example, the set it comes from and that set's epoch."""

    label: str
    epoch: int
    example: Example


class Documents(Protocol):
    """An endless stream of examples."""

    label: str

    def draw(self) -> Drawn: ...
    def state(self) -> State: ...
    def load(self, state: State) -> None: ...

    def once(self) -> Iterator[Drawn]:
        """Every example once, in the order of the data, whatever was drawn."""

    def fingerprint(self) -> State:
        """What tells these data from others, by label: cheap, and equal wherever the files lie."""


def derived_seed(seed: int, label: str) -> int:
    """A seed of a set's own, so that sets of one size are not shuffled alike."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{label}".encode()).digest()[:8], "big")


class TableDocuments:
    """A set whose rows are all at hand."""

    def __init__(self, label: str, rows: Sequence[Row], convert: Converter, seed: int, shuffle: bool) -> None:
        self.label, self._rows, self._convert = label, rows, convert
        self._seed, self._shuffle = derived_seed(seed, label), shuffle
        self._cursor = Cursor()
        self.load(asdict(self._cursor))

    def draw(self) -> Drawn:
        epoch = self._cursor.epoch
        row, self._cursor = next(self._order)
        return Drawn(self.label, epoch, self._convert(row, self._rows[row]))

    def state(self) -> State:
        return asdict(self._cursor)

    def load(self, state: State) -> None:
        self._cursor = Cursor(**state)
        self._order = next_rows(self._cursor, range(len(self._rows)), self._seed, self._shuffle)

    def once(self) -> Iterator[Drawn]:
        return (Drawn(self.label, 0, self._convert(i, row)) for i, row in enumerate(self._rows))

    def fingerprint(self) -> State:
        """The number of rows, and a digest of at most 64 of them."""
        step = -(-len(self._rows) // 64)
        text = repr([self._rows[i] for i in range(0, len(self._rows), step)])
        return {self.label: {"rows": len(self._rows), "digest": hashlib.sha256(text.encode()).hexdigest()[:16]}}


class MixedDocuments:
    """A mixture. Weights are relative; children are in the order of their labels, whatever the order of the file."""

    def __init__(self, label: str, children: Sequence[tuple[Documents, float]], seed: int) -> None:
        self.label = label
        self._seed = derived_seed(seed, label)
        ordered = sorted(children, key=lambda pair: pair[0].label)
        self._children = [child for child, _ in ordered]
        total = sum(weight for _, weight in ordered)
        self._shares = [weight / total for _, weight in ordered]
        self._draws = 0

    def draw(self) -> Drawn:
        child = self._children[self._pick(self._draws)]
        self._draws += 1
        return child.draw()

    def state(self) -> State:
        return {"draws": self._draws, "children": {child.label: child.state() for child in self._children}}

    def load(self, state: State) -> None:
        self._draws = state["draws"]
        for child in self._children:
            child.load(state["children"][child.label])

    def once(self) -> Iterator[Drawn]:
        return (drawn for child in self._children for drawn in child.once())

    def fingerprint(self) -> State:
        return {label: value for child in self._children for label, value in child.fingerprint().items()}

    def _pick(self, number: int) -> int:
        """The child of draw ``number``: where a hash of it, as a fraction, falls among the shares."""
        key = hashlib.sha256(f"{self._seed}:{number}".encode()).digest()
        left = int.from_bytes(key[:8], "big") / 2**64
        for index, share in enumerate(self._shares[:-1]):
            left -= share
            if left < 0:
                return index
        return len(self._shares) - 1


def check_not_empty(rows: int, key: str, where: str) -> None:
    """Raise DataError where a set has no rows."""
    if not rows:
        raise DataError(f"{key}.path: {where} has no rows: give it at least one")
