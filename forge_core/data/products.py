"""A task for a tool: multiply two numbers of two digits, ``47*83=`` -> ``3901``. All products have four digits.

A tiny model cannot multiply, but it can copy: ``[47*83]`` calls the calculator, whose answer follows the call.

Guarantees:
- ``prompts`` gives distinct pairs in an order that is a pure function of ``seed``.
- ``demonstrations`` never show a pair that ``eval.holdout`` holds out (give both the same share), in no turn. They show
  how a call is written and how a result is read, among turns that do otherwise: of the first turns the share ``calls``
  calls the tool and the others state the product at once; of the second turns the share ``reads`` repeats what the tool
  said and the others state another number. So a model that imitates them is right in about ``calls * reads`` of its
  episodes, and what pays is left for reinforcement learning to find.
"""

from __future__ import annotations

import random

from forge_core.data.prompts import held_out, prompt_id
from forge_core.models.special import EOS

PAIRS = [(a, b) for a in range(10, 100) for b in range(10, 100) if a * b >= 1000]


def prompts(size: int = len(PAIRS), seed: int = 0) -> list[dict[str, str]]:
    """``size`` of the pairs, shuffled, as rows with ``prompt`` and ``answer``."""
    return [
        {"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in random.Random(f"products:{seed}").sample(PAIRS, size)
    ]


def demonstrations(
    size: int = 28_800, seed: int = 0, holdout: float = 0.1, calls: float = 0.25, reads: float = 0.5
) -> list[dict[str, str]]:
    """``size`` single turns, half of them first ones: rows with ``prompt`` (all that stands before) and ``answer``."""
    draw = random.Random(f"products demonstrations:{seed}")
    rows: list[dict[str, str]] = []
    while len(rows) < size:
        a, b = draw.choice(PAIRS)
        question, call, product = f"{a}*{b}=", f"[{a}*{b}]", str(a * b)
        if held_out(prompt_id([{"role": "user", "content": question}]), holdout):
            continue
        rows.append({"prompt": question, "answer": call if draw.random() < calls else product})
        said = product if draw.random() < reads else str(draw.randrange(1000, 10_000))
        rows.append({"prompt": question + call + EOS + product, "answer": said})
    return rows
