"""Commands that look after a store and the runs in it."""

from __future__ import annotations

from flows.arguments.common import Commands


def add_to(commands: Commands) -> None:
    pass
