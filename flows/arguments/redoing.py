"""Commands that do one stage of a stored run again."""

from __future__ import annotations

from flows.arguments.common import Commands


def add_to(commands: Commands) -> None:
    pass
