"""Tiny runs end their engines with the test that made them; all are of one data file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sft import harness


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_data(tmp_path_factory.mktemp("sft") / "sorting.jsonl")


@pytest.fixture(autouse=True)
def _close_runs() -> Iterator[None]:
    yield
    while harness.OPENED:
        harness.OPENED.pop().close()
