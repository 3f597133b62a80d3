"""What a real server answers to those who look for the flow runs of a run."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Failed, Pending, Running, Scheduled, State

from flows import flow_runs
from flows.flow_runs import refreshed, set_state, unfinished
from flows.server import ServerHandle

pytestmark = pytest.mark.server


@flow(name="something")
def something() -> None: ...


def test_those_that_have_not_ended_are_found_page_by_page(
    prefect_server: ServerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_runs, "PAGE", 2)
    tag = f"run:{uuid.uuid4().hex}"
    going_on: list[State[Any]] = [Scheduled(), Pending(), Running(), Cancelling(), Running()]
    over: list[State[Any]] = [Completed(), Failed(), Crashed(name="Preempted"), Cancelled(), Completed()]
    with get_client(sync_client=True) as client:
        begin: Any = lambda state, tag: client.create_flow_run(something, tags=[tag], state=state)
        alive = {begin(state, tag).id for state in going_on}
        for state in over:
            begin(state, tag)
        begin(Running(), "run:another")
        assert {run.id for run in unfinished(client, tag)} == alive
        assert unfinished(client, f"{tag}-none") == []


def test_a_deleted_one_is_none_and_can_be_given_no_state(prefect_server: ServerHandle) -> None:
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(something, state=Running())
        assert (found := refreshed(client, run)) is not None
        assert found.id == run.id
        client.delete_flow_run(run.id)
        assert refreshed(client, run) is None
        set_state(client, run, Cancelling(message="too late"))
        set_state(client, run, Crashed(message="too late"), force=True)
