"""The completion is a row of blocks in tags, such as ``<think>…</think><answer>…</answer>``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


class FormatReward:
    """1 when the completion is the blocks of ``tags``, once each and in this order, none of them empty, with nothing
    but white space around them; else 0. Tags are written exactly so, without attributes.
    """

    needs_answer = False

    def __init__(self, tags: Sequence[str] = ("think", "answer")):
        if not tags or len(set(tags)) < len(tags) or not all(re.fullmatch(r"[\w-]+", tag) for tag in tags):
            raise ValueError(f"tags are {list(tags)}: they must be different words, such as [think, answer]")
        self.tags = list(tags)

    def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        if any(completion.count(mark) != 1 for mark in marks):
            return 0.0
        gaps = []
        for mark in marks:
            before, found, completion = completion.partition(mark)
            if not found:  # it stands before the mark that should precede it
                return 0.0
            gaps.append(before.strip())
        return float(not any(gaps[::2]) and all(gaps[1::2]) and not completion.strip())
