"""The completion matches a regular expression."""

from __future__ import annotations

import re
from typing import Any


class RegexReward:
    """1 when ``pattern`` (Python's ``re``; a full stop matches line ends too) is found in the completion, or with
    ``whole`` matches all of it without surrounding white space; else 0. ``ignore_case``: capitals do not count.
    """

    needs_answer = False
    can_hang = True  # some patterns take exponential time on some texts

    def __init__(self, pattern: str, whole: bool = False, ignore_case: bool = False):
        try:
            self.pattern = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
        except re.error as error:
            raise ValueError(f"the pattern {pattern!r} is no regular expression: {error}") from error
        self.whole = whole

    def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
        found = self.pattern.fullmatch(completion.strip()) if self.whole else self.pattern.search(completion)
        return float(found is not None)
