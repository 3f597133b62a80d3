"""The parts of the retraining flow that talk to Prefect or to a run's session."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from prefect import runtime
from prefect.states import Completed, State

from flows.announcing import announce
from flows.coordination import Coordination
from flows.distributed import coordinate
from flows.elsewhere import evaluated_elsewhere
from flows.grpo import train_policy
from flows.session import new_session, resumed_session
from flows.sft import train_steps
from flows.sft_session import new_sft_session, resumed_sft_session
from forge_core.config import RunConfig, store_uri
from forge_core.config.retrain_config import RetrainConfig
from forge_core.config.sft_config import SftConfig
from forge_core.evaluation.policies import Policy
from forge_core.retraining.beginning import NothingToDo, Retraining
from forge_core.retraining.report import VERBS, report
from forge_core.runs.early_end import is_finished
from forge_core.runs.record import load_run
from forge_core.stop import StopToken
from forge_core.store import Ledger, Store, layout, open_store
from forge_core.weights.registry import Entry, shown
from tasks.evaluate_model import evaluate_model

log = logging.getLogger("forge")


def retraining_name() -> str:
    """Name of the flow run in the UI."""
    config = runtime.flow_run.parameters["config"]
    return config.name if isinstance(config, RetrainConfig) else Path(config).stem


def store_of(run: RunConfig) -> Store:
    return open_store(store_uri(None, run))


def nothing_to_do(work: NothingToDo) -> State[Any]:
    log.info(work.why)
    return Completed(message=work.why)


def fine_tune_candidate(store: Store, config: SftConfig) -> State[Any]:
    """The supervised run of a retraining: begun, gone on with, or found finished."""
    run_id = str(config.run.id)
    begun = store.exists(layout.run_json(run_id))
    if begun and is_finished(store, load_run(store, run_id)):
        return Completed(message="fine-tuned before")
    session = resumed_sft_session(run_id, store.uri, {}, [], False) if begun else new_sft_session(config, {})
    with session:
        train_steps(session)
    assert session.outcome is not None
    return session.outcome


def train_candidate(store: Store, work: Retraining) -> State[Any]:
    """The GRPO run of a retraining: begun, gone on with, or found finished."""
    if Ledger(store, work.retrain_id).head() >= work.run.steps:
        return Completed(message="trained before")
    begun = store.exists(layout.run_json(work.retrain_id))
    if work.distributed:
        return _train_in_roles(store, work, begun)
    session = resumed_session(work.retrain_id, store.uri, {}, [], False) if begun else new_session(work.run, {})
    with session:
        train_policy(session)
    assert session.outcome is not None
    return session.outcome


def _train_in_roles(store: Store, work: Retraining, begun: bool) -> State[Any]:
    """The same run in roles, of which this process is the coordinator."""
    resumed = (None, {"store": store.uri}, work.retrain_id)
    with Coordination(*resumed) if begun else Coordination(work.run, {}, None) as run:
        coordinate(run)
    assert run.outcome is not None
    return run.outcome


def evaluated(store: Store, work: Retraining, policy: Policy, stop: StopToken) -> str:
    """The prefix of the evaluation of ``policy``, made here or, for a retraining in roles, where generators are."""
    if work.distributed:
        return evaluated_elsewhere(store, work.run, policy, stop)
    return evaluate_model(store.uri, work.run, policy, stop)


def announce_decision(entry: Entry) -> str:
    """Tell the Prefect server; the decision in one line."""
    verb = VERBS[entry["action"]]
    subject = entry["subject"]
    payload = {
        **{key: subject[key] for key in ("run_id", "version", "weights_digest")},
        **{"name": entry["name"], "entry": entry["n"], "reason": entry["reason"]},
        "retrain_id": entry["decision"]["retrain_id"],
    }
    announce(f"forge.model.{verb}", entry["name"], payload, report(entry))
    line = f"{verb} {shown(subject)} as {entry['name']}: {entry['reason']}"
    log.info(line)
    return line
