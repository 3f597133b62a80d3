"""The last number of the completion is the answer."""

from __future__ import annotations

from typing import Any

from forge_core.rewards.answers import answer_of
from forge_core.rewards.numbers import as_integer, last_number


class LastInteger:
    """1 when the last number of the completion is an integer equal to the answer; else 0."""

    needs_answer = True

    def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
        answer = as_integer(last_number(answer_of(metadata)))
        if answer is None:
            raise ValueError(f"the answer {metadata['answer']!r} is not an integer")
        return float(as_integer(last_number(completion)) == answer)
