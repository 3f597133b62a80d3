"""Rewards: functions or classes ``grade(prompt, completion, metadata) -> float``, combined with weights."""

from forge_core.rewards.actor import RewardActor
from forge_core.rewards.grading import Graded, RewardItem
from forge_core.rewards.resolve import BUILTINS, RewardError, needs_answer, resolve, source_digest

__all__ = [
    "BUILTINS",
    "Graded",
    "RewardActor",
    "RewardError",
    "RewardItem",
    "needs_answer",
    "resolve",
    "source_digest",
]
