"""An evaluation that a worker of the deployment ``evaluate/run`` makes, while this process waits for it in the store.

Invariants:
- What counts is the evaluation in the store; the flow run is only looked at to see that somebody works on it.
- One flow run at a time: one that an earlier start of this retraining has made is waited for, and so is one that has
  crashed or was preempted, which an automation starts again (``deploying_automations``). In place of one that somebody
  deleted another is begun.
- A server that does not answer is asked again at the next look.
"""

from __future__ import annotations

import logging
from datetime import timedelta

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun

from flows.deploying_automations import PAUSE
from flows.flow_runs import begin, ended, refreshed, unfinished
from forge_core.config import RunConfig
from forge_core.evaluation.evaluating import evaluation_prefix
from forge_core.evaluation.policies import Policy
from forge_core.runs.heartbeat import Unchanged
from forge_core.stop import StopToken
from forge_core.store import Store

DEPLOYMENT = "evaluate/run"
LOOK_S = 2.0
RESTART = PAUSE + timedelta(seconds=105)  # in which a crashed flow run is started again, or never is
log = logging.getLogger("forge")


class EvaluationLost(RuntimeError):
    """The flow run of an evaluation ended without the evaluation."""


def evaluated_elsewhere(store: Store, config: RunConfig, policy: Policy, stop: StopToken) -> str:
    """The prefix of the evaluation of ``policy``, once it is there. Raises EvaluationLost, Stopped."""
    prefix = evaluation_prefix(store, config, policy)
    flow_run: FlowRun | None = None
    unchanged = Unchanged()
    while not store.published(prefix):
        try:
            with get_client(sync_client=True) as client:
                flow_run = flow_run and refreshed(client, flow_run)
                flow_run = flow_run or _begun(client, store, config, policy, prefix)
        except (httpx.HTTPError, OSError) as outage:
            log.warning("the evaluation of %s cannot be looked after now: %s", policy.name, outage)
        if flow_run and flow_run.state and _is_over(flow_run, unchanged) and not store.published(prefix):
            raise EvaluationLost(
                f"flow run {flow_run.name} of {DEPLOYMENT} ended ({flow_run.state.name}: {flow_run.state.message}) "
                f"without the evaluation of {policy.name}, {prefix}: its worker must see the same data and rewards"
            )
        stop.wait(LOOK_S)
        stop.check()
    return prefix


def _is_over(run: FlowRun, unchanged: Unchanged) -> bool:
    """Whether nobody works on the flow run any more, or will."""
    crashed = run.state is not None and run.state.is_crashed()
    since_s = unchanged.seconds(run.id, (crashed, run.run_count))
    return ended(run) and not (crashed and since_s < RESTART.total_seconds())


def _begun(client: SyncPrefectClient, store: Store, config: RunConfig, policy: Policy, prefix: str) -> FlowRun:
    """The flow run of this evaluation that has not ended, or a new one."""
    tag = f"evaluation:{prefix.split('/')[1][:12]}"
    if begun := unfinished(client, tag):
        return begun[0]
    parameters = {"model": str(policy.version), "config": config.model_dump(mode="json"), "store": store.uri}
    return begin(client, DEPLOYMENT, parameters, tag)
