"""The built-in punishment of long responses."""

from __future__ import annotations

import pytest

from forge_core.config.reward_sections import RewardFunction
from forge_core.rewards.actor import RewardActor
from forge_core.rewards.grading import RewardItem
from forge_core.rewards.resolve import RewardError


def test_overlong_adds_to_the_reward_of_the_answer() -> None:
    options = {"max_tokens": 100, "buffer": 20}
    functions = [RewardFunction(path="exact_match"), RewardFunction(path="overlong", weight=0.5, options=options)]
    items = [RewardItem("p", "42", {"answer": "42", "response_tokens": n}) for n in (50, 90, 100, 150)]
    with_penalty = RewardActor(functions).grade_many(items)
    assert [g.reward for g in with_penalty] == [1.0, 0.75, 0.5, 0.5]
    assert [g.components["overlong"] for g in with_penalty] == [0.0, -0.5, -1.0, -1.0]


def test_an_impossible_buffer_is_an_error_before_anything_is_graded() -> None:
    with pytest.raises(RewardError, match="buffer is 20"):
        RewardActor([RewardFunction(path="overlong", options={"max_tokens": 10, "buffer": 20})])
