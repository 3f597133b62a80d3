"""The command that looks at data."""

from __future__ import annotations

from flows.arguments.common import Commands


def add_to(commands: Commands) -> None:
    commands.add(
        "data", "read a configuration's data and say what a run makes of it", config=True, store=False, overridable=True
    )
