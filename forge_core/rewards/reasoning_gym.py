"""The verifier of a reasoning-gym task."""

from __future__ import annotations

import re
from typing import Any, Literal

from forge_core.rewards.numbers import last_number
from forge_core.rewards.tags import contents

_TAG = re.compile(r"<(/?)answer>")


class ReasoningGym:
    """The score that the task's own verifier gives, for prompts of ``reasoning_gym://<task>``.

    ``extract`` says what the verifier sees: ``all`` of the completion, its ``last_number``, or the text of its last
    ``<answer>`` tag (``answer_tag``). A completion without a number or tag scores 0.
    """

    needs_answer = False  # the verifier has the whole entry; some tasks have no single answer

    def __init__(self, extract: Literal["all", "last_number", "answer_tag"] = "all"):
        if extract not in ("all", "last_number", "answer_tag"):
            raise ValueError(f"extract is {extract!r}; it must be all, last_number or answer_tag")
        self.extract = extract
        self._verifiers: dict[str, Any] = {}

    def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
        from forge_core.data.tagged import decode

        if "reasoning_gym" not in metadata:
            raise KeyError("the prompt is not from reasoning_gym://<task>, so it has no verifier: use another reward")
        stored = metadata["reasoning_gym"]
        answer = self._answer_in(completion)
        return 0.0 if answer is None else self._verifier(stored).score_answer(answer, decode(stored["entry"]))

    def _answer_in(self, completion: str) -> str | None:
        if self.extract == "last_number":
            return last_number(completion)
        if self.extract == "answer_tag":
            tags = contents(completion, _TAG)
            return tags[-1].strip() if tags else None
        return completion.strip()

    def _verifier(self, stored: dict[str, Any]) -> Any:
        """The task object; some verifiers read its options. One per task and options."""
        import reasoning_gym

        key = repr((stored["task"], stored["options"]))
        if key not in self._verifiers:
            self._verifiers[key] = reasoning_gym.create_dataset(stored["task"], **stored["options"])
        return self._verifiers[key]
