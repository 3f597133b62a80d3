"""Of two trainers of one run, the one whose step another has committed stops, and says why."""

from __future__ import annotations

import uuid

import pytest

from flows.flow_runs import SUPERSEDED
from flows.role_session import RoleSession, final_state
from forge_core.config import load_config
from forge_core.runs.context import RunContext
from forge_core.runs.record import create_run, load_run
from forge_core.runs.training import LostRace
from forge_core.store import Ledger, open_store
from tests.store.entries import RUN, entry, init_entry


def test_a_trainer_stops_when_another_one_is_at_work_and_says_so() -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    create_run(store, load_config({"run": {"id": RUN}, "rewards": {"functions": [{"path": "exact_match"}]}}))
    ledger = Ledger(store, RUN)
    ledger.commit_init(init_entry())
    context = RunContext(store, load_run(store, RUN), role="trainer")
    session = RoleSession("trainer", RUN, store.uri)
    session._context = context
    assert ledger.commit(entry(0, ledger.previous(0), attempt=context.attempt))
    session.check_sole(0)
    assert ledger.commit(entry(1, ledger.previous(1), attempt="another"))
    with pytest.raises(
        LostRace, match=r"committed by another trainer \(attempt another\).*one trainer per run"
    ) as lost:
        session.check_sole(1)
    state = final_state("trainer", lost.value)
    context.close()
    assert state is not None
    assert (state.name, state.is_failed(), state.message) == (SUPERSEDED, True, str(lost.value))
