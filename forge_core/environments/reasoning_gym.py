"""A task of reasoning-gym with several attempts: its own verifier grades each turn, and says whether to try again.

For prompts of ``dataset.path: reasoning_gym://<task>``. With one attempt this is the reward ``reasoning_gym``.
"""

from __future__ import annotations

from typing import Any

from forge_core.environments.protocol import Action, Step, Task
from forge_core.rewards.reasoning_gym import ReasoningGym


class ReasoningGymAttempts:
    """``attempts``: turns that the policy has. ``right``: the score from which on an answer is right. ``again``: what a
    wrong one is answered with. ``extract``: what of a turn the verifier sees, as of the reward. The episode's reward is
    the score of its last turn times ``discount`` for each attempt before it."""

    tools: tuple[Any, ...] = ()
    package = "reasoning-gym"

    def __init__(
        self,
        attempts: int = 2,
        right: float = 1.0,
        again: str = "That is not right. Try again.",
        extract: Any = "all",
        discount: float = 1.0,
    ) -> None:
        self._attempts, self._right, self._again, self._discount = attempts, right, again, discount
        self._verifier, self._taken = ReasoningGym(extract), 0

    def reset(self, task: Task) -> None:
        self._metadata = dict(task.metadata)

    def step(self, action: Action) -> Step:
        score = float(self._verifier.grade("", action.text, self._metadata))
        self._taken += 1
        if score >= self._right or self._taken == self._attempts:
            reward = score * self._discount ** (self._taken - 1)
            return Step(reward=reward, done=True, counts={"attempts": 1, "solved": score >= self._right})
        return Step([{"role": "user", "content": self._again}], counts={"attempts": 1})

    def close(self) -> None:
        pass
