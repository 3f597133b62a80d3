"""What decides the grades of rewards, for the digest of what is asked for; and whether they can be used here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from forge_core.config.references import revealed
from forge_core.config.reward_sections import all_rewards
from forge_core.rewards.grading import Spec
from forge_core.rewards.resolve import BUILTINS, check_built_in, check_own, resolve, source_digest

if TYPE_CHECKING:
    from forge_core.config.reward_sections import BuiltinReward, RewardFunction


def reward_identity(functions: Iterable[RewardFunction | BuiltinReward]) -> list[dict[str, Any]]:
    """Name, weight, options and source of each function; not the folder that its file lies in, nor an option that
    decides no grade (``decide_nothing`` of its class). What the options only point at is in ``files``; the verifiers of
    an ensemble are in ``verifiers``."""
    return [_identity(function) for function in functions]


def check_rewards(functions: Iterable[RewardFunction | BuiltinReward]) -> None:
    """Raise RewardError for a reward that cannot be used on this machine. Nothing large is loaded, and no code of the
    user is called."""
    for function in all_rewards(functions):
        if ":" in function.path:
            check_own(Spec(function.path, function.path, function.weight, function.options))
            continue
        resolve(function.path)
        options = revealed(function.options, "rewards.functions: options")
        check_built_in(Spec(function.path, function.path, function.weight, options))


def _identity(function: RewardFunction | BuiltinReward) -> dict[str, Any]:
    found = resolve(function.path) if function.path in BUILTINS else None
    left_out: frozenset[str] = getattr(found, "decide_nothing", frozenset())
    identity = {
        "name": function.path.rpartition(":")[2],
        "weight": function.weight,
        "options": {key: value for key, value in function.options.items() if key not in left_out},
        "source": source_digest(function.path),
    }
    if function.members:
        identity["verifiers"] = reward_identity(function.members)
    return identity | (found.identity(function.options) if hasattr(found, "identity") else {})  # type: ignore[union-attr]
