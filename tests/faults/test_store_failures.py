"""A store that fails once, anywhere between the optimizer step and the checkpoint.

The task is tried again in the same process, or the run goes on in another one: either way the run is bit for bit the
one that nothing happened to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from forge_core.runs.context import RunContext
from forge_core.runs.training import train_batch
from forge_core.store import Manifest, Store, StoreError, layout, open_store
from tests.faults.stored import Stored, check_same_run
from tests.runs.harness import advance, make_batch, new_run, reopened

pytestmark = pytest.mark.engine

STEPS, BATCH = 4, 1  # step 1 is followed by a checkpoint


class FailingOnce(Store):
    """Fails the first time something below a prefix is written: ``before`` it is written, or after (a lost reply)."""

    fail: tuple[str, str] | None = None
    failures = 0

    def publish(
        self, prefix: str, files: Mapping[str, bytes | Path], *, request: str, provenance: Any = None
    ) -> Manifest:
        return self._failing(prefix, lambda: super(FailingOnce, self).publish(
            prefix, files, request=request, provenance=provenance
        ))  # fmt: skip

    def put_new_json(self, key: str, value: Mapping[str, Any]) -> bool:
        return self._failing(key, lambda: super(FailingOnce, self).put_new_json(key, value))

    def _failing(self, key: str, write: Callable[[], Any]) -> Any:
        if self.fail is None or not key.startswith(self.fail[1]):
            return write()
        (when, _), self.fail = self.fail, None
        self.failures += 1
        if when == "after":
            write()
        raise StoreError(f"the store went away {when} {key} was written")


FAILURES = [
    ("before", layout.weights("tiny", BATCH + 1, "x")[:-2]),
    ("after", layout.weights("tiny", BATCH + 1, "x")[:-2]),
    ("before", layout.training("tiny", BATCH, "x")[:-2]),
    ("before", layout.ledger("tiny", BATCH)),
    ("after", layout.ledger("tiny", BATCH)),
    ("before", layout.checkpoint("tiny", BATCH, "x")[:-2]),
    ("after", layout.checkpoint("tiny", BATCH, "x")[:-2]),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    root = tmp_path_factory.mktemp("whole")
    advance(new_run(str(root), "max_staleness=1"), STEPS)
    return Stored(root)


@pytest.mark.parametrize("after", ["retry", "resume"])
@pytest.mark.parametrize(("when", "what"), FAILURES, ids=lambda value: value.removeprefix("runs/tiny/").rstrip("-"))
def test_a_failure_of_the_store_changes_nothing(
    when: str, what: str, after: str, whole: Stored, tmp_path: Path
) -> None:
    ctx = failing_run(tmp_path)
    ctx.store.fail = (when, what)  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match=f"went away {when} "):
        train_batch(ctx, BATCH)
    assert ctx.store.failures == 1  # type: ignore[attr-defined]
    if after == "retry":
        optimizer_steps = ctx.trainer._loaded().step
        train_batch(ctx, BATCH)
        assert ctx.trainer._loaded().step == optimizer_steps == BATCH + 1, "it did not step twice"
        assert ctx.store.published(layout.checkpoint("tiny", BATCH, ctx.attempt)), "it is made up for"
    else:
        ctx = reopened(ctx)
    advance(ctx, STEPS)
    check_same_run(Stored(tmp_path), whole, STEPS)
    weights = [key for key in ctx.store.list("runs/tiny/weights") if key.endswith("manifest.json")]
    abandoned = len(weights) - (STEPS + 1)
    assert 0 <= abandoned <= (after == "resume" and not committed(what, when)), "no step is published again"


def committed(what: str, when: str) -> bool:
    return "checkpoints" in what or (when, what) == ("after", layout.ledger("tiny", BATCH))


def failing_run(root: Path) -> RunContext:
    """The tiny run before training step 1, on a store that can be made to fail."""
    store = open_store(str(root))
    store.__class__ = FailingOnce
    ctx = advance(new_run(store, "max_staleness=1"), BATCH)
    make_batch(ctx, BATCH)
    make_batch(ctx, BATCH + 1)
    return ctx
