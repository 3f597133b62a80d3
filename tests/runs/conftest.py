"""Tiny runs end their engines and grading processes with the test that made them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runs import harness


@pytest.fixture(autouse=True)
def _close_runs() -> Iterator[None]:
    yield
    while harness.OPENED:
        harness.OPENED.pop().close()
