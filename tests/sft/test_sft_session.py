"""What the session of a supervised run asks the ledger, without Prefect and without an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flows.sft_session import SftSession
from forge_core.runs import RunRef
from forge_core.runs.record import create_run
from forge_core.runs.versions import VALIDATION
from forge_core.stop import Stopped
from forge_core.store import Ledger, Store, StoreError, layout
from forge_core.store.memory import MemoryBackend
from tests.sft.harness import tiny

RUN = "tiny-sft"


class Counting(MemoryBackend):
    """Counts entries of the ledger that are read; fails while it is ``down``."""

    reads, down = 0, False

    def read(self, path: str) -> bytes:
        if self.down:
            raise StoreError("the store does not answer")
        self.reads += "/ledger/" in path
        return super().read(path)

    def exists(self, path: str) -> bool:
        if self.down:
            raise StoreError("the store does not answer")
        return super().exists(path)


def session_on(backend: Counting, *overrides: str) -> SftSession:
    """What ``enough`` and ``_final_state`` need of a session."""
    store = Store(backend)
    record = create_run(store, tiny(Path("data.jsonl"), *overrides))
    store.put_new_json(layout.ledger_init(RUN), {"version": 0})
    session = object.__new__(SftSession)
    context = SimpleNamespace(store=store, record=record, ledger=Ledger(store, RUN))
    session._context, session.run, session.config = cast(Any, context), RunRef(RUN, store.uri), record.config
    return session


def step(session: SftSession, batch: int, loss: float) -> None:
    entry = {"batch": batch, "version_out": batch + 1, "metrics": {VALIDATION: loss}}
    session._context.store.put_new_json(layout.ledger(RUN, batch), entry)


@pytest.mark.parametrize(("patience", "reads"), [("null", 0), ("100", 50)])
def test_no_entry_of_the_ledger_is_read_twice_to_know_whether_it_is_enough(patience: str, reads: int):
    backend = Counting(f"reads-{patience}")
    session = session_on(backend, f"validation.patience={patience}", "steps=50")
    for batch in range(50):
        assert not session.enough()
        step(session, batch, 1.0 / (batch + 1))
    assert not session.enough()
    assert backend.reads == reads


@pytest.mark.parametrize("error", [Stopped("Ctrl-C"), ValueError("what really happened")])
def test_an_outage_of_the_store_takes_the_place_of_no_outcome(error: Exception):
    backend = Counting(f"outage-{type(error).__name__}")
    session = session_on(backend)
    backend.down = True
    state = session._final_state(error)
    assert state.is_cancelled()
    assert str(error) in str(state.message)


def test_a_run_that_ended_early_says_so_although_the_store_has_gone_since():
    backend = Counting("early")
    session = session_on(backend, "validation.patience=2", "steps=50")
    for batch, loss in enumerate([3.0, 2.0, 2.1, 2.2]):
        assert not session.enough()
        step(session, batch, loss)
    assert session.enough()
    backend.down = True
    state = session._final_state(None)
    assert state.is_completed()
    assert "4 training steps committed: the validation loss is lowest for version 2" in str(state.message)
