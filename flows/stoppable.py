"""Work outside of a run that Ctrl-C, SIGTERM, ``forge stop`` and Cancel in the UI end as they end a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flows.stopping import StopWatcher
from forge_core.stop import StopToken
from forge_core.store import Store


@contextmanager
def stoppable(store: Store, run_id: str, flow_run: Any = None) -> Iterator[StopToken]:
    """A token that is set when somebody wants this process's work on ``run_id`` to end. ``flow_run``: the id of the
    flow run that does it, if one does."""
    stop = StopToken()
    with StopWatcher(stop, store, run_id, flow_run):
        yield stop
