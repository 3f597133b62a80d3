"""Rewards that come with Forge. Each is a class whose options are its arguments, with a ``grade`` method."""

from __future__ import annotations

import re
from typing import Any, Literal

from forge_core.algorithms.shaping import overlong_penalty
from forge_core.rewards.numbers import as_integer, last_number


class ExactMatch:
    """1 when the completion, without surrounding white space, is the answer; else 0.

    ``require_eos``: also only when the model ended it (``finish_reason`` is ``stop``).
    """

    needs_answer = True

    def __init__(self, require_eos: bool = False):
        self.require_eos = require_eos

    def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
        ended = not self.require_eos or metadata["finish_reason"] == "stop"
        return float(ended and completion.strip() == _answer(metadata).strip())


class LastInteger:
    """1 when the last number of the completion is an integer equal to the answer; else 0."""

    needs_answer = True

    def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
        answer = as_integer(last_number(_answer(metadata)))
        if answer is None:
            raise ValueError(f"the answer {metadata['answer']!r} is not an integer")
        return float(as_integer(last_number(completion)) == answer)


class Overlong:
    """DAPO's soft punishment of long responses: 0 up to ``max_tokens - buffer``, down to ``-factor`` at ``max_tokens``.

    ``max_tokens`` is usually ``rollout.max_new_tokens``; ``buffer`` is in tokens too.
    """

    needs_answer = False

    def __init__(self, max_tokens: int, buffer: int, factor: float = 1.0):
        self.arguments = (max_tokens, buffer, factor)
        overlong_penalty(0, *self.arguments)  # a buffer that cannot be is an error now, not at the first response

    def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
        return overlong_penalty(metadata["response_tokens"], *self.arguments)


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
            tags = re.findall(r"<answer>(.*?)</answer>", completion, flags=re.DOTALL)
            return tags[-1].strip() if tags else None
        return completion.strip()

    def _verifier(self, stored: dict[str, Any]) -> Any:
        """The task object; some verifiers read its options. One per task and options."""
        import reasoning_gym

        key = repr((stored["task"], stored["options"]))
        if key not in self._verifiers:
            self._verifiers[key] = reasoning_gym.create_dataset(stored["task"], **stored["options"])
        return self._verifiers[key]


def _answer(metadata: dict[str, Any]) -> str:
    if metadata.get("answer") is None:
        raise KeyError("the prompt has no answer to compare with: set dataset.answer_column")
    return str(metadata["answer"])
