"""What is graded, what comes out, and the grading of one item.

Guarantees:
- A grade that raises or is no finite number is an error with its text, never a 0.
- An error's text is stored: secrets of the environment are left out of it.
- The other components of a failed item are still graded and recorded.
- This module imports nothing but the standard library (nor does what it imports): grading processes start with it.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_core.redaction import redact

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
    ``timeout``, with the text in ``error``). ``components`` are unweighted, by name."""

    reward: float | None
    components: dict[str, float]
    status: str = "ok"
    error: str | None = None


@dataclass(frozen=True)
class Spec:
    """A component before it is built; goes to grading processes."""

    name: str
    path: str
    weight: float
    options: dict[str, Any]
    folder: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """Grades of one item, before weights."""

    components: dict[str, float]
    status: str = "ok"
    error: str | None = None


def grade_item(functions: Sequence[tuple[str, Grade]], item: RewardItem) -> Outcome:
    """Grade ``item`` with every ``(name, grade)``."""
    components: dict[str, float] = {}
    errors: list[str] = []
    for name, grade in functions:
        try:
            components[name] = _number(grade(item.prompt, item.completion, item.metadata))
        except Exception as error:  # a reward may fail in any way; it is recorded with the episode
            errors.append(f"{name}: {type(error).__name__}: {redact(str(error))}{_place(error)}")
    return Outcome(components, "error" if errors else "ok", "; ".join(errors) or None)


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
