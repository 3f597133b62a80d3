"""An evaluation that a worker of the deployment ``evaluate/run`` makes, while this process waits for it in the store.

Invariants:
- What counts is the evaluation in the store; the flow run is only looked at to see that somebody works on it.
- One flow run at a time: one that an earlier start of this retraining has made is waited for.
- A server that does not answer is asked again at the next look.
"""

from __future__ import annotations

import logging

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun

from flows.flow_runs import begin, ended, unfinished
from forge_core.config import RunConfig
from forge_core.evaluation.evaluating import evaluation_prefix
from forge_core.evaluation.policies import Policy
from forge_core.stop import StopToken
from forge_core.store import Store

DEPLOYMENT = "evaluate/run"
LOOK_S = 2.0
log = logging.getLogger("forge")


class EvaluationLost(RuntimeError):
    """The flow run of an evaluation ended without the evaluation."""


def evaluated_elsewhere(store: Store, config: RunConfig, policy: Policy, stop: StopToken) -> str:
    """The prefix of the evaluation of ``policy``, once it is there. Raises EvaluationLost, Stopped."""
    prefix = evaluation_prefix(store, config, policy)
    flow_run: FlowRun | None = None
    while not store.published(prefix):
        try:
            with get_client(sync_client=True) as client:
                flow_run = (
                    client.read_flow_run(flow_run.id) if flow_run else _begun(client, store, config, policy, prefix)
                )
        except (httpx.HTTPError, OSError) as outage:
            log.warning("the evaluation of %s cannot be looked after now: %s", policy.name, outage)
        if flow_run and flow_run.state and ended(flow_run) and not store.published(prefix):
            raise EvaluationLost(
                f"flow run {flow_run.name} of {DEPLOYMENT} ended ({flow_run.state.name}: {flow_run.state.message}) "
                f"without the evaluation of {policy.name}, {prefix}: its worker must see the same data and rewards"
            )
        stop.wait(LOOK_S)
        stop.check()
    return prefix


def _begun(client: SyncPrefectClient, store: Store, config: RunConfig, policy: Policy, prefix: str) -> FlowRun:
    """The flow run of this evaluation that has not ended, or a new one."""
    tag = f"evaluation:{prefix.split('/')[1][:12]}"
    if begun := unfinished(client, tag):
        return begun[0]
    parameters = {"model": str(policy.version), "config": config.model_dump(mode="json"), "store": store.uri}
    return begin(client, DEPLOYMENT, parameters, tag)
