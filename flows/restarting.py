"""A flow run that is started again, after a crash or with Retry in the UI, goes on with the run that it made.

Invariants:
- Where the configuration names no run, the run's id follows from the flow run alone: each start finds the same run.
- Only the flow run that made a run goes on with it unasked; another one with the same ``run.id`` is refused.
- A run of a deployment whose machine is taken (SIGTERM) ends as ``Preempted``, which is a crash: it is started again.
- A flow run that keeps crashing ends as Failed: it may be started ``CRASHES`` times more often than it has finished
  batches, which are training steps, or batches that were graded again.
"""

from __future__ import annotations

from typing import Any

from prefect import runtime
from prefect.context import FlowRunContext
from prefect.states import Cancelled, Crashed, State

from flows.flow_runs import PREEMPTED
from flows.stopping import SIGTERM
from forge_core.config import ConfigError
from forge_core.runs.record import C, load_run, with_new_id
from forge_core.runs.rescored import finished_batches
from forge_core.store import Store, layout

CRASHES = 3


def flow_run_id() -> str | None:
    """Id of the flow run that this process works on."""
    return runtime.flow_run.id


def is_deployed() -> bool:
    """Whether this flow run is one of a deployment. Known here: Prefect's ``runtime.deployment`` asks the server, and
    fails without one."""
    context = FlowRunContext.get()
    return bool(context and context.flow_run and context.flow_run.deployment_id)


def stopped_state(stopped: BaseException, message: str, *, restarted: bool) -> State[Any]:
    """The final state of a flow that was stopped. One whose machine is taken is to be started again, where somebody
    does that (``restarted``): an automation what is deployed, a coordinator its roles. Everything else was wanted."""
    if restarted and getattr(stopped, "reason", None) == SIGTERM:
        return Crashed(name=PREEMPTED, message=message)
    return Cancelled(message=message)


def with_run_id(config: C, flow: str) -> C:
    """``config`` with a run id: its own, or that of this flow run."""
    if config.run.id is not None:
        return config
    context = FlowRunContext.get()
    return with_new_id(config, flow, context.flow_run.created if context and context.flow_run else None)


def started_before(store: Store, run_id: str) -> bool:
    """Whether this flow run has made ``run_id`` already. Raises ConfigError when starting it again leads nowhere."""
    key = layout.run_json(run_id)
    if flow_run_id() is None or not store.exists(key) or store.read_json(key).get("flow_run") != flow_run_id():
        return False
    starts, finished = runtime.flow_run.run_count, finished_batches(store, load_run(store, run_id))
    if starts > finished + 1 + CRASHES:
        raise ConfigError(
            f"this flow run was started {starts} times and has finished {finished} batches: look into the log for the "
            f"cause; once it is mended: forge resume {run_id}"
        )
    return True
