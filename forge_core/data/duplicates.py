"""Prompts that a set holds more than once, or that are both trained on and evaluated.

Guarantees:
- Equal prompts are found by ``prompt_id``. Hash splitting keeps them on one side, so only a set of its own
  (``eval.split``) can repeat a training prompt exactly.
- Near duplicates differ in nothing but case, white space and punctuation; a hash does part those.
- Nothing is removed: which of two rows is right, and whether a repeat is meant, is not for Forge to say.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forge_core.data.prompts import Prompt

Pair = tuple[int, int]  # row numbers
_ENDS_A_WORD = re.compile(r"[.,;:!?'\"`]+(?=\s|$)")


@dataclass(frozen=True)
class DuplicateReport:
    """Pairs of rows: the first that holds a prompt, and a later one (of ``across`` and ``nearly_across``: a training
    row and an evaluated one). A pair is in one list only, the first that suits it."""

    conflicting: list[Pair]  # equal prompts with different answers
    repeated: list[Pair]
    near: list[Pair]
    across: list[Pair]
    nearly_across: list[Pair]

    def lines(self, key: str = "dataset") -> list[str]:
        """What a person should know, a sentence for each kind; empty when there are none."""
        kinds = (
            (self.conflicting, "rows repeat an earlier prompt with another answer"),
            (self.repeated, "rows repeat an earlier prompt"),
            (self.near, "rows differ from an earlier prompt only in case, space or punctuation"),
            (self.across, "evaluated prompts are trained on too"),
            (self.nearly_across, "evaluated prompts differ from one trained on only in case, space or punctuation"),
        )
        return [f"{key}.path: {len(pairs)} {what} ({_examples(pairs)})" for pairs, what in kinds if pairs]


def find_duplicates(train: Iterable[Prompt], evaluated: Iterable[Prompt] = ()) -> DuplicateReport:
    """Duplicates within ``train``, and between it and what is ``evaluated``."""
    report = DuplicateReport([], [], [], [], [])
    exact: dict[str, Prompt] = {}
    loose: dict[str, Prompt] = {}
    for prompt in train:
        normal = normalised(prompt)
        if first := exact.get(prompt.prompt_id):
            kind = report.repeated if prompt.target == first.target else report.conflicting
            kind.append((first.row, prompt.row))
        elif like := loose.get(normal):
            report.near.append((like.row, prompt.row))
        exact.setdefault(prompt.prompt_id, prompt)
        loose.setdefault(normal, prompt)
    for prompt in evaluated:
        if first := exact.get(prompt.prompt_id):
            report.across.append((first.row, prompt.row))
        elif like := loose.get(normalised(prompt)):
            report.nearly_across.append((like.row, prompt.row))
    return report


def normalised(prompt: Prompt) -> str:
    """The text of the messages in lower case, with single spaces and without the punctuation that ends words. What
    stands within words stays: 3.5 is not 35."""
    text = unicodedata.normalize("NFKC", " ".join(message["content"] for message in prompt.messages)).casefold()
    return " ".join(_ENDS_A_WORD.sub("", text).split())


def _examples(pairs: Sequence[Pair]) -> str:
    shown = ", ".join(f"{first} and {second}" for first, second in pairs[:3])
    return f"rows {shown}{', …' if len(pairs) > 3 else ''}"
