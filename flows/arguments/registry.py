"""Commands of the model registry."""

from __future__ import annotations

from flows.arguments.common import Commands


def add_to(commands: Commands) -> None:
    pass
