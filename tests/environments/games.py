"""A game for the tiny model, whose vocabulary has few letters: three turns, a comma after each but the last."""

from __future__ import annotations

from typing import Any

from forge_core.environments.protocol import Action, Step, Task


class Turns:
    """The reward is the share of turns that begin with a digit of the prompt. A prompt with the digit ``breaks`` has a
    game that breaks in its second turn, one with the digit ``missing`` none at all."""

    tools: tuple[Any, ...] = ()

    def __init__(self, turns: int = 3, breaks: str = "", missing: str = "") -> None:
        self._turns, self._breaks, self._missing, self._taken = turns, breaks, missing, 0

    def reset(self, task: Task) -> None:
        self._prompt = task.messages[-1]["content"]
        if self._missing and self._missing in self._prompt:
            raise OSError("there is no board")

    def step(self, action: Action) -> Step:
        self._taken += 1
        if self._breaks and self._breaks in self._prompt and self._taken == 2:
            raise OSError("the board is gone")
        reward = float(action.text[:1] in set(self._prompt) & set("0123456789")) / self._turns
        if self._taken == self._turns:
            return Step(reward=reward, done=True, counts={"moves": 1})
        return Step([{"role": "user", "content": ","}], reward=reward, counts={"moves": 1})

    def close(self) -> None:
        pass
