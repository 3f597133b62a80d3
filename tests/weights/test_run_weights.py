"""The weights of a real run: on this host before the generator asks for them, and gone with the run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from forge_core.runs.context import RunContext
from tests.runs.harness import advance, memory, new_run

pytestmark = pytest.mark.engine


def cached(tmp_path: Path, ctx: RunContext, version: int) -> list[Path]:
    name = ctx.ledger.weights_prefix(version).rstrip("/").rpartition("/")[2]
    return [path for path in tmp_path.glob(f"weights-cache/*/{name}-*") if path.is_dir() and not path.suffix]


def test_a_committed_version_is_on_this_host_before_it_is_asked_for(tmp_path: Path) -> None:
    ctx = advance(new_run(memory()), 1)
    deadline = time.monotonic() + 10
    while not (folders := cached(tmp_path, ctx, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for key in ctx.store.list(ctx.ledger.weights_prefix(1)):
        if not key.endswith("manifest.json"):
            ctx.store.delete(key)
    assert ctx.generator(1).get_version() == 1
    assert [ctx.weights_dir(1)] == folders
    ctx.close()
    assert cached(tmp_path, ctx, 1) == []
