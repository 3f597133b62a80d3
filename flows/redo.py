"""Any stage again, alone: grade stored episodes with other rewards, or train from them with another loss.

Nothing is generated: what a batch is made of is the parent's. So there is no staleness window; ``AHEAD`` batches are
read ahead of the one that is graded or trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prefect import flow

from flows.redo_session import new_redo_session, resumed_redo_session
from flows.session import Session
from flows.task_runner import LOCAL_TASKS
from tasks import initialise, train
from tasks.rescore import rescore as rescore_batch
from tasks.reuse import reuse, reuse_or_compute_reference

AHEAD = 2


@dataclass(frozen=True)
class StoredStages:
    """The tasks of the loops below. Anything with ``submit(*args, wait_for=…)`` can stand in for one."""

    reuse: Any = reuse
    rescore: Any = rescore_batch
    reference: Any = reuse_or_compute_reference
    train: Any = train


STAGES = StoredStages()


@flow(name="rescore", flow_run_name="rescore {parent}", task_runner=LOCAL_TASKS)
def rescore(
    parent: str,
    store: str,
    rewards: list[str] | None = None,
    overrides: list[str] | None = None,
    allow_code_change: bool = False,
) -> Any:
    """Grade all stored episodes of the run ``parent`` again, as a new run. ``rewards``: each ``PATH`` or
    ``PATH:weight``."""
    how = {"rewards": rewards or []}
    with new_redo_session("rescore", parent, store, overrides or [], allow_code_change, **how) as session:
        grade_again(session)
    return session.outcome


@flow(name="retrain-from", flow_run_name="retrain from {parent}", task_runner=LOCAL_TASKS)
def retrain_from(
    parent: str,
    store: str,
    loss: str | None = None,
    from_version: int = 0,
    overrides: list[str] | None = None,
    allow_code_change: bool = False,
) -> Any:
    """Train a new run from the stored episodes of the run ``parent``, from its version ``from_version`` on."""
    how = {"loss": loss, "from_version": from_version}
    with new_redo_session("retrain-from", parent, store, overrides or [], allow_code_change, **how) as session:
        train_again(session)
    return session.outcome


@flow(name="redo-resume", flow_run_name="{run_id}", task_runner=LOCAL_TASKS)
def redo_resume(
    run_id: str,
    store: str,
    overrides: list[str] | None = None,
    allow_config_change: list[str] | None = None,
    allow_code_change: bool = False,
) -> Any:
    """Go on with a run that one of the flows above has made, exactly where it stopped."""
    changes = (overrides or [], allow_config_change or [], allow_code_change)
    session = resumed_redo_session(run_id, store, *changes)
    with session:
        work = {"rescore": grade_again, "retrain-from": train_again}[session.kind]
        work(session)
    return session.outcome


def grade_again(session: Session) -> None:
    """Every batch that is not graded yet."""
    run, window, graded = session.run, session.window, dict[int, Any]()
    for b in range(session.first_batch(), session.config.steps):
        window.committed(b - AHEAD)
        before = [graded.pop(b - 1)] if b - 1 in graded else []
        episodes = STAGES.reuse.submit(run, b)
        graded[b] = STAGES.rescore.submit(run, b, episodes, wait_for=before)
        window.open(b, graded[b], reuse=[episodes])
    window.drain()


def train_again(session: Session) -> None:
    """Version 0, which is the parent's, then every training step that is not committed yet."""
    run, window, trained = session.run, session.window, dict[int, Any]()
    initialise(run)
    for b in range(session.first_batch(), session.config.steps):
        window.committed(b - AHEAD)
        before = [trained.pop(b - 1)] if b - 1 in trained else []
        episodes = STAGES.reuse.submit(run, b)
        reference = [STAGES.reference.submit(run, b, episodes)] if session.config.grpo.beta > 0 else []
        trained[b] = STAGES.train.submit(run, b, [], [], [episodes], reference, wait_for=before)
        window.open(b, trained[b], reuse=[episodes], reference=reference)
    window.drain()
