"""The completion is as long as it should be."""

from __future__ import annotations

from typing import Any, Literal

UNITS = ("tokens", "words", "characters")


class LengthReward:
    """1 for a length from ``at_least`` to ``at_most``, falling to 0 along a line at ``slack`` + 1 outside of that.

    ``unit``: ``tokens`` (those that the policy sampled), ``words`` or ``characters``.
    """

    needs_answer = False

    def __init__(
        self,
        at_least: int = 0,
        at_most: int | None = None,
        slack: int = 0,
        unit: Literal["tokens", "words", "characters"] = "tokens",
    ):
        if unit not in UNITS:
            raise ValueError(f"unit is {unit!r}; it must be one of {', '.join(UNITS)}")
        if at_most is not None and at_most < at_least:
            raise ValueError(f"at_most={at_most} is below at_least={at_least}, which no length can meet")
        self.at_least, self.at_most, self.slack, self.unit = at_least, at_most, slack, unit

    def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
        length = self._length(completion, metadata)
        over = 0 if self.at_most is None else length - self.at_most
        outside = max(over, self.at_least - length, 0)
        return max(0.0, 1.0 - outside / (self.slack + 1))

    def _length(self, completion: str, metadata: dict[str, Any]) -> int:
        if self.unit == "tokens":
            return int(metadata["response_tokens"])
        return len(completion.split()) if self.unit == "words" else len(completion)
