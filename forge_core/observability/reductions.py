"""How recorded values become one value, exactly.

Invariants:
- Merging the states of any number of ranks and processes, in any order, gives bit for bit what one accumulator would
  have given that saw all values: sums are exact fractions and are rounded once, at the end.
- A state is plain JSON, so it travels with whatever its process publishes.
- A value that is no finite number is not lost: it makes the reduced value infinite or NaN.
- Standard library only: grading processes import this.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from itertools import pairwise
from typing import Any, Protocol

SAMPLES = 20  # rows of a table that are kept, at most

State = dict[str, Any]


class Reduce(Enum):
    """``STD`` is the population's (0 for one value). ``SAMPLE`` keeps rows of a table: mappings, of which those with
    the highest and lowest ``reward`` (or ``score``) stay."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    STD = "std"
    SAMPLE = "sample"


class Accumulator(Protocol):
    """Takes values, or other accumulators' states; ``value`` is what they come to, of ``count`` values."""

    count: int

    def append(self, value: Any) -> None: ...
    def merge(self, state: State) -> None: ...
    def state(self) -> State: ...
    def value(self) -> Any: ...


@dataclass
class _Sum:
    """An exact sum; ``odd`` adds up what is not finite."""

    total: Fraction = field(default_factory=Fraction)
    odd: float = 0.0

    def add(self, value: float, square: bool = False) -> None:
        if math.isfinite(value):
            exact = Fraction(value)
            self.total += exact * exact if square else exact
        else:
            self.odd += value

    def merge(self, state: list[Any]) -> None:
        self.total += Fraction(state[0])
        self.odd += float(state[1])  # text: JSON has no word for it

    def state(self) -> list[Any]:
        return [str(self.total), repr(self.odd)]


def _rounded(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:  # beyond the largest float
        return math.inf if exact > 0 else -math.inf


class _Mean:
    def __init__(self) -> None:
        self.count, self._sum = 0, _Sum()

    def append(self, value: float) -> None:
        self.count += 1
        self._sum.add(value)

    def merge(self, state: State) -> None:
        self.count += state["count"]
        self._sum.merge(state["sum"])

    def state(self) -> State:
        return {"count": self.count, "sum": self._sum.state()}

    def value(self) -> float:
        return self._sum.odd or _rounded(self._sum.total / self.count) if self.count else 0.0


class _Total(_Mean):
    def value(self) -> float:
        return self._sum.odd or _rounded(self._sum.total)


class _Std:
    def __init__(self) -> None:
        self.count, self._sum, self._squares = 0, _Sum(), _Sum()

    def append(self, value: float) -> None:
        self.count += 1
        self._sum.add(value)
        self._squares.add(value, square=True)

    def merge(self, state: State) -> None:
        self.count += state["count"]
        self._sum.merge(state["sum"])
        self._squares.merge(state["squares"])

    def state(self) -> State:
        return {"count": self.count, "sum": self._sum.state(), "squares": self._squares.state()}

    def value(self) -> float:
        if self._sum.odd:
            return math.nan
        n = max(self.count, 1)
        return math.sqrt(_rounded(self._squares.total / n - (self._sum.total / n) ** 2))


class _Extreme:
    def __init__(self, best: Any) -> None:
        self.count, self._best, self._found = 0, best, math.nan

    def append(self, value: float) -> None:
        self._take(1, value)

    def merge(self, state: State) -> None:
        self._take(state["count"], float(state["best"]))

    def _take(self, count: int, value: float) -> None:
        known = self.count > 0
        unknown = math.isnan(value) or (known and math.isnan(self._found))
        self._found = math.nan if unknown else self._best(self._found, value) if known else value
        self.count += count

    def state(self) -> State:
        return {"count": self.count, "best": repr(self._found)}

    def value(self) -> float:
        return self._found


class _Samples:
    """Half of ``SAMPLES`` rows from the top, half from the bottom; of equal ones, those whose text comes first."""

    def __init__(self) -> None:
        self.count = 0
        self._rows: list[dict[str, Any]] = []

    def append(self, value: Mapping[str, Any]) -> None:
        self._take(1, [dict(value)])

    def merge(self, state: State) -> None:
        self._take(state["count"], state["rows"])

    def _take(self, count: int, rows: list[dict[str, Any]]) -> None:
        self.count += count
        ordered = sorted([*self._rows, *rows], key=_rank)
        half = SAMPLES // 2
        self._rows = ordered if len(ordered) <= SAMPLES else [*ordered[:half], *ordered[-half:]]

    def state(self) -> State:
        return {"count": self.count, "rows": self._rows}

    def value(self) -> list[dict[str, Any]]:
        return self._rows


def _rank(row: Mapping[str, Any]) -> tuple[float, str]:
    """Highest first."""
    score = row.get("reward", row.get("score"))
    number = float(score) if isinstance(score, int | float) and not math.isnan(score) else 0.0
    return -number, json.dumps(row, sort_keys=True, default=str)


def accumulator(reduction: Reduce) -> Accumulator:
    """A new one of this kind."""
    if reduction is Reduce.MAX:
        return _Extreme(max)
    if reduction is Reduce.MIN:
        return _Extreme(min)
    kinds: dict[Reduce, type[Any]] = {
        Reduce.MEAN: _Mean,
        Reduce.SUM: _Total,
        Reduce.STD: _Std,
        Reduce.SAMPLE: _Samples,
    }
    found: Accumulator = kinds[reduction]()
    return found


@dataclass(frozen=True)
class Reduced:
    """``value`` of ``count`` recorded values of ``key``: a number, or the rows of a table."""

    key: str
    reduction: Reduce
    value: Any
    count: int


def merged(states: Iterable[Mapping[str, State]]) -> list[Reduced]:
    """One value for each key and reduction of several ranks' states (``Collector.drain``), by key."""
    found: dict[tuple[str, str], Accumulator] = {}
    for key, state in (item for one in states for item in one.items()):
        name = (key, state["reduction"])
        if name not in found:
            found[name] = accumulator(Reduce(state["reduction"]))
        found[name].merge(state)
    return [Reduced(key, Reduce(kind), one.value(), one.count) for (key, kind), one in sorted(found.items())]


def reduce_metrics_states(states: Iterable[Mapping[str, State]]) -> list[Reduced]:
    """``merged``, where a key must be reduced in one way: ValueError otherwise."""
    reduced = merged(states)
    for before, after in pairwise(reduced):
        if before.key == after.key:
            kinds = f"{before.reduction.value} and as {after.reduction.value}"
            raise ValueError(f"metric {after.key!r} is recorded as {kinds}: use one of them")
    return reduced
