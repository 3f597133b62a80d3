"""The quickstart's task: sort five digits ascending, ``s:47120=`` -> ``01247``.

Guarantees:
- ``prompts`` gives distinct strings in an order that is a pure function of ``seed``.
- ``demonstrations`` never show a string that ``eval.holdout`` holds out (give both the same share): the warm start
  learns nothing about the held-out prompts. The share ``right`` of them sorts; the others copy, reverse or sort
  descending, so that there is something left for reinforcement learning to find.
"""

from __future__ import annotations

import random

from forge_core.data.prompts import held_out, prompt_id

DIGITS = 5
STRINGS = 10**DIGITS


def prompts(size: int = STRINGS, seed: int = 0) -> list[dict[str, str]]:
    """``size`` of the 100 000 strings, shuffled, as rows with ``prompt`` and ``answer``."""
    numbers = random.Random(f"sort_digits:{seed}").sample(range(STRINGS), size)
    return [{"prompt": _prompt(_digits(number)), "answer": _ascending(_digits(number))} for number in numbers]


def demonstrations(size: int = 28_800, seed: int = 0, holdout: float = 0.1, right: float = 0.4) -> list[dict[str, str]]:
    """``size`` demonstrations on strings that are not held out, as rows with ``prompt`` and ``answer``."""
    draw = random.Random(f"sort_digits demonstrations:{seed}")
    rows: list[dict[str, str]] = []
    while len(rows) < size:
        digits = _digits(draw.randrange(STRINGS))
        procedure = _ascending if draw.random() < right else draw.choice(WRONG)
        if not held_out(prompt_id([{"role": "user", "content": _prompt(digits)}]), holdout):
            rows.append({"prompt": _prompt(digits), "answer": procedure(digits)})
    return rows


def _digits(number: int) -> str:
    return f"{number:0{DIGITS}d}"


def _prompt(digits: str) -> str:
    return f"s:{digits}="


def _ascending(digits: str) -> str:
    return "".join(sorted(digits))


def _descending(digits: str) -> str:
    return _ascending(digits)[::-1]


def _copy(digits: str) -> str:
    return digits


def _reverse(digits: str) -> str:
    return digits[::-1]


WRONG = (_copy, _reverse, _descending)
