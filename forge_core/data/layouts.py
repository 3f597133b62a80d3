"""Which columns hold the prompt and the ground truth.

Known layouts, recognised by their columns (on the hub or in a file of the same schema):

- GSM8K: ``question``, ``answer``; the target is the text after ``####``.
- MATH: ``problem``, ``answer`` (MATH-500), else ``problem``, ``solution``; then the target is the last ``\\boxed{}``.
- DAPO-Math-17k: ``prompt`` (chat messages), ``reward_model.ground_truth``.

Anything else uses the first of the usual names. A column may be a dotted path into a struct.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge_core.data.errors import DataError
from forge_core.rewards.extraction import boxed

PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
CONVERSATIONS = "messages"  # a column of these may end with the reply that is the answer
ANSWER_COLUMNS = ("answer", "target", "solution")
# A box without braces ends with its formula, whatever TeX would put into it.
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*([^{}$\s](?:(?!\\[\])])[^$\n])*)\$")
CONFIG_NAMES = {"openai/gsm8k": "main", "gsm8k": "main"}  # hub sets that need a configuration name


@dataclass(frozen=True)
class Layout:
    """``prompt`` and ``answer`` are columns (``answer`` None: no ground truth); ``extract`` finds the target."""

    prompt: str
    answer: str | None
    extract: Callable[[str], str] | None = None


def choose_layout(
    columns: Sequence[str], prompt: str | None, answer: str | None, *, where: str, key: str, needs_answer: bool
) -> Layout:
    """The layout of a set with these ``columns``; ``prompt`` and ``answer`` are what the user set, if anything.

    ``where`` names the set and ``key`` its configuration section in errors. Raises DataError.
    """
    found_prompt = prompt or _first(PROMPT_COLUMNS, columns)
    known = _known(found_prompt, columns)
    found_answer = answer or (known.answer if known else _first(ANSWER_COLUMNS, columns))
    if found_prompt is None or not _has(found_prompt, columns):
        raise DataError(_missing(f"{key}.prompt_column", found_prompt, PROMPT_COLUMNS, columns, where))
    lacking = needs_answer and found_answer is None and found_prompt != CONVERSATIONS
    if lacking or (found_answer is not None and not _has(found_answer, columns)):
        raise DataError(_missing(f"{key}.answer_column", found_answer, ANSWER_COLUMNS, columns, where))
    extract = known.extract if known and known.answer == found_answer else None
    return Layout(found_prompt, found_answer, extract)


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column or of a dotted path into one; None when a part is missing."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def after_hashes(text: str) -> str:
    """GSM8K: what follows the last ``####``, or the whole text when there is none."""
    return text.rpartition("####")[2].strip()


def last_boxed(text: str) -> str:
    r"""MATH: the content of the last ``\boxed{...}``, ``\fbox{...}`` or ``\boxed 5`` (the set has all three), as the
    rewards find it: neighbours are one list; or the whole text when there is none."""
    last = max(text.rfind(name) for name in (r"\boxed", r"\fbox"))
    if bare := _BARE_BOX.match(text, max(last, 0)):
        return bare[1].rstrip(" .,")
    found = boxed(text)
    return found[-1].strip() if found else text.strip()


def _known(prompt: str | None, columns: Sequence[str]) -> Layout | None:
    """The known layout whose prompts are in the column ``prompt``; MATH-500 needs none: its names are the usual."""
    if prompt == "prompt" and "reward_model" in columns:
        return Layout("prompt", "reward_model.ground_truth")
    if prompt == "problem" and "solution" in columns and "answer" not in columns:
        return Layout("problem", "solution", last_boxed)
    if prompt == "question" and "answer" in columns:
        return Layout("question", "answer", after_hashes)
    return None


def _has(column: str, columns: Sequence[str]) -> bool:
    return column in columns or column.split(".")[0] in columns


def _first(names: Sequence[str], columns: Sequence[str]) -> str | None:
    return next((name for name in names if name in columns), None)


def _missing(key: str, column: str | None, usual: Sequence[str], columns: Sequence[str], where: str) -> str:
    what = f"no column {column!r}" if column else f"none of the usual columns {', '.join(usual)}"
    return f"{key}: {where} has {what}; its columns are {', '.join(columns)}: set {key} to one of them"
