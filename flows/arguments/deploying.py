"""Commands that put flows on a Prefect server, and start its processes."""

from __future__ import annotations

from flows.arguments.common import Commands


def add_to(commands: Commands) -> None:
    pass
