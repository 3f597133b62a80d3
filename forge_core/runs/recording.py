"""What code records while a stage works: it is published with the stage's object, as a part of its provenance."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forge_core.observability.metrics import collecting, drained, put_back
from forge_core.store import StoreError

if TYPE_CHECKING:
    from forge_core.runs.context import RunContext


@contextmanager
def recording(ctx: RunContext) -> Iterator[Callable[[], dict[str, Any]]]:
    """Gives a function that returns what the manifest of the stage's object says: when it was finished, by which
    process, and what was recorded."""
    ctx.metric_log.open()
    with collecting() as collector:
        yield lambda: {
            "finished_at_s": time.time(),
            "process": ctx.attempt,
            **({"recorded": states} if (states := drained(collector)) else {}),
        }


@contextmanager
def recorded_by_trainer() -> Iterator[dict[str, Any]]:
    """What the entry of a training step says of what was recorded since the step began. When the store fails in the
    block, it is there for the next try."""
    states = drained()
    try:
        yield {"recorded": states} if states else {}
    except (OSError, StoreError):
        put_back(states)
        raise
