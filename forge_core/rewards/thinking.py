"""The completion thinks before it answers, in ``<think>`` tags."""

from __future__ import annotations

import re
from typing import Any

from forge_core.rewards.tags import contents

_TAG = re.compile(r"<\s*(/?)\s*think\s*>", re.IGNORECASE)


class ThinkingReward:
    """``full_reward`` when a ``<think>…</think>`` block holds more than white space; ``partial_reward`` when there is
    any think tag; else 0. What is thought, and whether the answer is right, does not matter.

    Case and white space inside of tags do not count. Some chat templates write the opening tag themselves, as the end
    of the prompt: then the completion has only the closing one, which is partial.
    """

    needs_answer = False

    def __init__(self, partial_reward: float = 0.2, full_reward: float = 1.0):
        self.partial_reward, self.full_reward = partial_reward, full_reward

    def grade(self, prompt: str, completion: str | None, metadata: dict[str, Any]) -> float:
        text = completion or ""
        if any(_TAG.sub("", thought).strip() for thought in contents(text, _TAG)):
            return self.full_reward
        return self.partial_reward if _TAG.search(text) else 0.0
