"""The completion is the answer."""

from __future__ import annotations

from typing import Any

from forge_core.rewards.answers import answer_of, normal_form


class ExactMatch:
    """1 when the completion, without surrounding white space, is the answer; else 0.

    ``require_eos``: also only when the model ended it (``finish_reason`` is ``stop``). ``normalize``: case,
    punctuation, English articles and repeated white space do not count.
    """

    needs_answer = True

    def __init__(self, require_eos: bool = False, normalize: bool = False):
        self.require_eos, self.normalize = require_eos, normalize

    def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
        ended = not self.require_eos or metadata["finish_reason"] == "stop"
        form = normal_form if self.normalize else str.strip
        return float(ended and form(completion) == form(answer_of(metadata)))
