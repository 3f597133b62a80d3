"""A real run of four steps, made once: reports and watching look at it."""

from __future__ import annotations

import pytest

from forge_core.store import Store
from tests.runs import harness


@pytest.fixture(scope="session")
def real_run() -> Store:
    """A store with the finished run ``tiny``."""
    ctx = harness.advance(harness.new_run(harness.memory(), "max_staleness=1"), 4)
    harness.OPENED.remove(ctx)
    ctx.close()
    return ctx.store
