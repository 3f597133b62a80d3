"""Processes of a test that end with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.processes import Forge


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Forge]]:
    """``started(*arguments, folder=tmp_path)`` starts a ``forge`` process."""
    running: list[Forge] = []

    def start(*arguments: object, folder: Path = tmp_path) -> Forge:
        running.append(Forge(folder, *arguments))
        return running[-1]

    yield start
    for forge in running:
        forge.end()
