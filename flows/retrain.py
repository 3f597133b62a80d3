"""Scheduled retraining: new data, supervised training if wanted, a candidate, its evaluation, the gate, the registry.

Everything is in the store and none of it twice: a retraining that is started again after a crash, with the same inputs
or the same ``retrain_id``, goes on with its run, finds its evaluations, and is decided once. Training happens in this
process, not in a flow of its own: a flow that starts while the Prefect server restarts fails, a running one goes on.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, runtime
from prefect.states import Completed

from flows.output import outlive_readers
from flows.parameters import RetrainParameter
from flows.restarting import is_deployed, stopped_state
from flows.retraining import (
    announce_decision,
    evaluated,
    fine_tune_candidate,
    nothing_to_do,
    retraining_name,
    store_of,
    train_candidate,
)
from flows.stoppable import stoppable
from forge_core.config.retrain_config import load_retrain_config, supervised_run
from forge_core.retraining.beginning import NothingToDo, Retraining, begin, fine_tuned
from forge_core.retraining.judging import enter
from forge_core.stop import Stopped, StopToken
from forge_core.store import Store
from tasks.promote import promote_or_reject


@flow(name="retrain", flow_run_name=retraining_name)
def retrain(
    config: RetrainParameter,
    overrides: dict[str, Any] | list[str] | None = None,
    retrain_id: str | None = None,
    force: bool = False,
) -> Any:
    """Train the production model on new data, and promote the result if it passes the gate.

    ``config``: a YAML file or the values. ``overrides``: dotted keys of it, or of the run. ``retrain_id``: goes on with
    this retraining; left out: the one that these data, model and settings mean. ``force``: also without new data.
    """
    outlive_readers()
    settings, run = load_retrain_config(config, overrides or {})
    store = store_of(run)
    work = begin(store, settings, run, retrain_id, force, supervised_run(settings))
    if isinstance(work, NothingToDo):
        return nothing_to_do(work)
    if work.sft is not None:
        tuned = fine_tune_candidate(store, work.sft)
        if not tuned.is_completed():
            return tuned
        work = fine_tuned(store, work)
    trained = train_candidate(store, work)
    if not trained.is_completed():
        return trained
    try:
        with stoppable(store, work.retrain_id, runtime.flow_run.id) as stop:
            entry = judged(store, work, stop)
    except Stopped as stopped:
        message = f"{stopped}; start the retraining again to go on with {work.retrain_id}"
        return stopped_state(stopped, message, restarted=is_deployed())
    return Completed(message=announce_decision(entry))


def judged(store: Store, work: Retraining, stop: StopToken) -> dict[str, Any]:
    """The registry entry that promotes or rejects the candidate. When another model became the production model
    meanwhile, the candidate is compared with that one."""
    entry = None
    while entry is None:
        contest = enter(store, work)
        opponents = {"candidate": contest.candidate, "baseline": contest.baseline}
        evaluations = {role: evaluated(store, work, policy, stop) for role, policy in opponents.items()}
        entry = promote_or_reject(store.uri, work, contest, evaluations, stop)
    return entry
