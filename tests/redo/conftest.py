"""Runs with a parent, driven stage by stage without Prefect; engines end with the test that made them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runs import harness


@pytest.fixture(autouse=True)
def _close_runs() -> Iterator[None]:
    yield
    while harness.OPENED:
        harness.OPENED.pop().close()
