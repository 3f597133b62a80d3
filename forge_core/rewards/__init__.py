"""Rewards: functions or classes ``grade(prompt, completion, metadata) -> float``, combined with weights.

``RewardActor`` is imported when it is used: a grading process starts with the rest, which needs the standard library
alone.
"""

from typing import TYPE_CHECKING, Any

from forge_core.rewards.grading import Graded, RewardItem
from forge_core.rewards.resolve import BUILTINS, RewardError, needs_answer, resolve, source_digest

if TYPE_CHECKING:
    from forge_core.rewards.actor import RewardActor

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


def __getattr__(name: str) -> Any:
    if name != "RewardActor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from forge_core.rewards.actor import RewardActor

    return RewardActor
