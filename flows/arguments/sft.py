"""The command of supervised runs."""

from __future__ import annotations

from flows.arguments.common import Commands


def add_to(commands: Commands) -> None:
    commands.add("sft", "fine-tune a model on conversations", config=True, overridable=True)
