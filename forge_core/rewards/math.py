"""Mathematical answers: numbers by value, everything else as mathematics (math-verify, with sympy).

What is right here where math-verify 0.9 differs: grouped digits, ``3 1/2``, ``1.5e3``, repeating decimals, numbers with
a base, ``(C)``, ``5.``, ``\\log`` for the natural logarithm, ``e^{i\\pi}``, a relation for its interval; and an exact
number is not equal to its rounding, ``x`` not to ``X``, 5 cm not to 5 m.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from forge_core.rewards.answers import answer_of
from forge_core.rewards.extraction import Place, after_thinking, has_box, marked_answer, outside_tags
from forge_core.rewards.latex import equal, last_expression
from forge_core.rewards.numbers import close, numbers_in, plain_number


class MathReward:
    """1 when the response's answer is ``metadata["answer"]``, as mathematics; else 0, or ``partial_credit``.

    ``extract``: the answer stands in ``<answer>`` tags (``answer_tag``), in ``\\boxed{}`` (``boxed``), or (``any``) in
    a tag, else in a box, else it is the last expression of the text. ``take``: which of several marks, ``last`` or
    ``first``. ``tolerance``: largest difference of two plain numbers. ``partial_credit``: for a wrong or unmarked
    answer when the right number stands, as a number of its own, outside of the tags.

    ``MathReward(partial_credit=0.1, extract="answer_tag", take="first")`` grades as torchforge's reward, whose partial
    credit also found 5 in 15. An empty answer is never matched: 0.
    """

    needs_answer = True
    can_hang = True  # sympy may take for ever to simplify or evaluate what a model wrote

    def __init__(
        self,
        tolerance: float = 1e-6,
        partial_credit: float = 0.0,
        extract: Place = "any",
        take: Literal["last", "first"] = "last",
    ):
        if extract not in get_args(Place) or take not in ("last", "first"):
            raise ValueError(
                f"extract is {extract!r} and take {take!r}: extract is any, answer_tag or boxed, and take last or first"
            )
        self.tolerance, self.partial_credit, self.extract, self.take = tolerance, partial_credit, extract, take

    def grade(self, prompt: str, completion: str | None, metadata: dict[str, Any]) -> float:
        gold, text = answer_of(metadata).strip(), completion or ""
        if not gold:
            return 0.0
        given = self._answer_in(text)
        if given and equal(gold, given, self.tolerance):
            return 1.0
        return self.partial_credit if self.partial_credit and self._stands_in(gold, text) else 0.0

    def _answer_in(self, text: str) -> str | None:
        marked = marked_answer(text, self.extract, self.take)
        if marked is not None or self.extract != "any" or has_box(after_thinking(text)):
            return marked
        return last_expression(after_thinking(text))

    def _stands_in(self, gold: str, text: str) -> bool:
        wanted = plain_number(gold)
        found = numbers_in(outside_tags(text)) if wanted is not None else []
        return any(close(number, wanted, self.tolerance) for number in found if wanted is not None)
