"""Flow runs on the server, for those who start some and look after them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun

PREEMPTED, SUPERSEDED, REFUSED = "Preempted", "Superseded", "Refused"  # names of final states of ours


def ended(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_final()


def unfinished(client: SyncPrefectClient, tag: str) -> list[FlowRun]:
    """The flow runs with ``tag`` that have not ended."""
    wanted = FlowRunFilter.model_validate({"tags": {"all_": [tag]}})
    return [run for run in client.read_flow_runs(flow_run_filter=wanted, limit=200) if not ended(run)]


def begin(client: SyncPrefectClient, deployment: str, parameters: Mapping[str, Any], *tags: str) -> FlowRun:
    """A new flow run of ``deployment`` (its full name)."""
    found = client.read_deployment_by_name(deployment)
    return client.create_flow_run_from_deployment(found.id, parameters=dict(parameters), tags=tags)
