"""Flow runs on the server, for those who start some and look after them.

Invariant: a flow run that somebody deleted is None to those who look at it, and nothing to those who end it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.states import State

PREEMPTED, SUPERSEDED, REFUSED = "Preempted", "Superseded", "Refused"  # names of final states of ours
PAGE = 200  # flow runs that the server gives at a time


def ended(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_final()


def unfinished(client: SyncPrefectClient, tag: str) -> list[FlowRun]:
    """The flow runs with ``tag`` that have not ended, however many there are and were."""
    final = sorted(state.value for state in TERMINAL_STATES)
    wanted = FlowRunFilter.model_validate({"tags": {"all_": [tag]}, "state": {"type": {"not_any_": final}}})
    found: list[FlowRun] = []
    for page in count():
        runs = client.read_flow_runs(flow_run_filter=wanted, sort=FlowRunSort.ID_DESC, limit=PAGE, offset=page * PAGE)
        found += [run for run in runs if not ended(run)]
        if len(runs) < PAGE:
            break
    return found


def refreshed(client: SyncPrefectClient, run: FlowRun) -> FlowRun | None:
    """The flow run as it is now; None: somebody deleted it."""
    try:
        return client.read_flow_run(run.id)
    except ObjectNotFound:
        return None


def set_state(client: SyncPrefectClient, run: FlowRun, state: State[Any], *, force: bool = False) -> None:
    """Give the flow run another state, unless somebody deleted it."""
    with suppress(ObjectNotFound):
        client.set_flow_run_state(run.id, state, force=force)


def begin(client: SyncPrefectClient, deployment: str, parameters: Mapping[str, Any], *tags: str) -> FlowRun:
    """A new flow run of ``deployment`` (its full name)."""
    found = client.read_deployment_by_name(deployment)
    return client.create_flow_run_from_deployment(found.id, parameters=dict(parameters), tags=tags)
