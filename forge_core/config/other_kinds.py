"""Whether a file that is no configuration of a GRPO run is one of another command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError


def other_kind(tree: Mapping[str, Any]) -> str | None:
    """The command that ``tree`` is for, in words, where it is valid for that."""
    from forge_core.config.retrain_config import RetrainConfig  # it imports the loader, which imports this
    from forge_core.config.sft_config import SftConfig

    if _valid(SftConfig, tree):
        return "this is a configuration of supervised training: use forge sft, and forge config --sft to check it"
    if _valid(RetrainConfig, tree):
        return "this is a configuration of retraining: use forge retrain"
    return None


def _valid(model: Any, tree: Mapping[str, Any]) -> bool:
    try:
        model.model_validate(tree)
    except ValidationError:
        return False
    return True
