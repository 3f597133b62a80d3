"""A small game: find a number by asking. Each guess is answered with ``higher`` or ``lower``.

The number is the answer of the row (``prompts`` makes rows). The reward is 1 for finding it.
"""

from __future__ import annotations

import random
import re
from typing import Any

from forge_core.environments.protocol import Action, Step, Task

_NUMBER = re.compile(r"-?\d+")
RULES = "I think of a number from 1 to {most}. Guess it: say one number; I answer higher or lower."


class GuessNumber:
    """``most``: the largest number. ``role``: of the game's messages."""

    tools: tuple[Any, ...] = ()

    def __init__(self, most: int = 100, role: str = "user") -> None:
        self._most, self._role = most, role

    def reset(self, task: Task) -> None:
        if task.answer is None or not 1 <= int(task.answer) <= self._most:
            raise ValueError(f"the answer of the row, {task.answer!r}, is no number from 1 to {self._most}")
        self._secret = int(task.answer)

    def step(self, action: Action) -> Step:
        numbers = _NUMBER.findall(action.text)
        if not numbers:
            return self._say("say a number", invalid_moves=1)
        guess = int(numbers[-1][:20])
        if guess == self._secret:
            return Step(reward=1.0, done=True, counts={"guesses": 1})
        return self._say("higher" if guess < self._secret else "lower", guesses=1)

    def close(self) -> None:
        pass

    def _say(self, text: str, **counts: float) -> Step:
        return Step([{"role": self._role, "content": text}], counts=counts)


def prompts(size: int, seed: int, most: int = 100) -> list[dict[str, Any]]:
    """Rows of games, for ``dataset.path: python://forge_core.environments.guess:prompts``."""
    rng = random.Random(seed)
    return [
        {"prompt": RULES.format(most=most), "answer": str(rng.randint(1, most)), "game": number}
        for number in range(size)
    ]
