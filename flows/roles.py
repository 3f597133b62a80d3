"""The roles of a run on several machines: one long-lived flow run each, which meet only in the store.

The same tasks, the same numbers as the one-flow run. A role waits for the objects that its column of the DAG needs,
runs its task, publishes. Roles may start in any order, join late, and be started again. Generators, scorers and
references may be several: each takes what no other has claimed. There is one trainer: of two, the ledger lets one win.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.role_session import RoleSession
from flows.task_runner import LOCAL_TASKS
from forge_core.runs.candidates import evaluated_elsewhere, take_candidate
from forge_core.runs.frontier import Evaluation, Rollout
from tasks import evaluate, initialise, reference_logprobs, rollout, score, train


@flow(name="generator", flow_run_name="generator {run_id}", task_runner=LOCAL_TASKS)
def generator(run_id: str, store: str, name: str | None = None) -> Any:
    """Sample the shards of open batches that nobody else has claimed, and the evaluations that are due."""
    with RoleSession("generator", run_id, store, name) as role:
        role.open()
        role.await_policy()
        for work in role.work(lambda: role.claimed(role.frontier.sampling)):
            if isinstance(work, Rollout):
                role.start(work, rollout.submit(role.run, work.batch, work.shard, work.round), role.at_once)
            elif isinstance(work, Evaluation):
                take_candidate(role.context, work.version)
                role.start(work, evaluate.submit(role.run, work.version), role.at_once)
    return role.outcome


@flow(name="scorer", flow_run_name="scorer {run_id}", task_runner=LOCAL_TASKS)
def scorer(run_id: str, store: str, name: str | None = None) -> Any:
    """Grade the sampled shards of open batches that nobody else has claimed."""
    with RoleSession("scorer", run_id, store, name) as role:
        role.open()
        role.context.start_grading(role.context.ledger.head())
        for work in role.work(lambda: role.claimed(role.frontier.unscored)):
            role.start(work, score.submit(role.run, work.episodes.batch, work.episodes))
    return role.outcome


@flow(name="reference", flow_run_name="reference {run_id}", task_runner=LOCAL_TASKS)
def reference(run_id: str, store: str, name: str | None = None) -> Any:
    """Compute the reference log-probabilities of the sampled shards of open batches that nobody else has claimed."""
    with RoleSession("reference", run_id, store, name) as role:
        role.open()
        role.await_policy()
        for work in role.work(lambda: role.claimed(role.frontier.unreferenced)):
            role.start(work, reference_logprobs.submit(role.run, work.batch, work.episodes))
    return role.outcome


@flow(name="trainer", flow_run_name="trainer {run_id}", task_runner=LOCAL_TASKS)
def trainer(run_id: str, store: str, name: str | None = None) -> Any:
    """Publish version 0, then take every training step as soon as what it consumes is there."""
    with RoleSession("trainer", run_id, store, name) as role:
        role.open()
        role.context.evaluate = evaluated_elsewhere
        initialise(role.run)
        role.context.load_trainer(role.context.ledger.head())
        for step in role.work(role.frontier.step):
            role.start(step, train.submit(role.run, step.batch, [], [], [], []))
            role.check_sole(step.batch)
    return role.outcome
