"""Words shared with the answer."""

from __future__ import annotations

from collections import Counter
from typing import Any

from forge_core.rewards.answers import answer_of, normal_form


class F1:
    """F1 of the words of completion and answer, in normal form, from 0 to 1 (Rajpurkar et al., arXiv 1606.05250).

    Words count as often as they occur. Two texts without any word are equal: 1.
    """

    needs_answer = True

    def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
        given, wanted = (Counter(normal_form(text).split()) for text in (completion, answer_of(metadata)))
        if not given or not wanted:
            return float(given == wanted)
        return 2 * (given & wanted).total() / (given.total() + wanted.total())
