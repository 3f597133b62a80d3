"""A punishment of responses that are too long."""

from __future__ import annotations

from typing import Any

from forge_core.algorithms.shaping import overlong_penalty


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
