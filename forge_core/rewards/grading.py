"""What is graded, what comes out, and the grading of one item by one reward.

Guarantees:
- A grade that raises or is no finite number is an error with its text, never a 0.
- An error's text is stored: secrets of the environment are left out of it.
- The other components of a failed item are still graded and recorded.
- This module imports nothing but the standard library (nor does what it imports): grading processes start with it.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forge_core.observability.metrics import Metric
from forge_core.redaction import redact

if TYPE_CHECKING:
    from forge_core.stop import StopToken

Grade = Callable[[str, str, dict[str, Any]], Any]


@dataclass(frozen=True)
class RewardItem:
    """One completion to grade. ``metadata`` holds ``answer`` (the target), ``prompt_messages``, ``finish_reason``
    and the row's other columns."""

    prompt: str
    completion: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Graded:
    """``reward`` is the weighted sum of ``components``, or None unless ``status`` is ``ok`` (else ``error`` or
    ``timeout``, with the text in ``error``). ``components`` are unweighted, by name; ``<name>/<part>`` is what a
    component was made of (the votes of an ensemble) and has no weight of its own."""

    reward: float | None
    components: dict[str, float]
    status: str = "ok"
    error: str | None = None


@dataclass(frozen=True)
class Spec:
    """A component before it is built; goes to grading processes. ``timeout_s``: seconds for one grade."""

    name: str
    path: str
    weight: float
    options: dict[str, Any]
    folder: Path | None = None
    timeout_s: float = 30.0


@dataclass(frozen=True)
class Grading:
    """The grade that one reward gave to one item (None unless ``status`` is ``ok``), and the seconds it took.
    ``recorded``: the metrics of a grading process."""

    value: float | None
    status: str = "ok"
    error: str | None = None
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    recorded: tuple[Metric, ...] = ()


class BatchReward(Protocol):
    """A reward that grades many items at once, in this process: a model, a remote judge, an ensemble."""

    def grade_many(
        self, items: Sequence[RewardItem], stop: StopToken | None = None
    ) -> tuple[list[Grading], dict[str, float]]:
        """Grades in the order of ``items``, and metrics of the call (counts, costs). A failed item is a Grading
        without a value. Raises Stopped soon after ``stop`` is set."""
        ...

    def close(self) -> None: ...


def grade_item(grade: Grade, item: RewardItem) -> Grading:
    """Grade ``item`` with one reward."""
    start = time.perf_counter()
    try:
        value = _number(grade(item.prompt, item.completion, item.metadata))
    except Exception as error:  # a reward may fail in any way; it is recorded with the episode
        return Grading(None, "error", failure_text(error), time.perf_counter() - start)
    return Grading(value, seconds=time.perf_counter() - start)


def combine(gradings: Sequence[tuple[str, Grading]], weights: dict[str, float]) -> Graded:
    """The reward of one item from its components; None when one of them failed, or is no finite number."""
    gradings = [(name, _finite(grading)) for name, grading in gradings]
    components: dict[str, float] = {}
    for name, grading in gradings:
        if grading.value is not None:
            components[name] = grading.value
        components |= {f"{name}/{part}": value for part, value in grading.parts.items() if math.isfinite(value)}
    failed = [(name, g) for name, g in gradings if g.value is None]
    if failed:
        status = "timeout" if any(g.status == "timeout" for _, g in failed) else "error"
        return Graded(None, components, status, "; ".join(f"{name}: {g.error}" for name, g in failed))
    total = sum(weights[name] * components[name] for name, _ in gradings)
    if not math.isfinite(total):
        return Graded(None, components, "error", f"the sum of the weighted grades is {total}, which is not finite")
    return Graded(total, components)


def _finite(grading: Grading) -> Grading:
    """A grade that is no finite number has failed: as a reward it would spoil its group and the training step."""
    if grading.value is None or math.isfinite(grading.value):
        return grading
    return replace(grading, value=None, status="error", error=f"the grade is {grading.value}, which is not finite")


def failure_text(error: Exception) -> str:
    """The error as it is stored: its kind, text and place, without secrets."""
    return f"{type(error).__name__}: {redact(str(error))}{_place(error)}"


def _number(value: Any) -> float:
    """``value`` as a float: Python, NumPy and one-element tensor numbers, and True/False."""
    if not hasattr(value, "__float__"):
        raise TypeError(f"grade returned {value!r} ({type(value).__name__}), which is not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"grade returned {number}, which is not finite")
    return number


def _place(error: Exception) -> str:
    """File and line that raised, when that is code of a reward."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
