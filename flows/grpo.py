"""GRPO as a workflow: rollout, score, reference and train tasks under a staleness window.

Training step ``b`` turns policy version ``b`` into ``b + 1``. Batch ``b`` may be sampled by any version ``>= b - S``
(``S = max_staleness``), so opening batch ``b`` waits for training step ``b - S - 1``: ``S = 0`` is on-policy, a larger
``S`` lets generation run ahead. There is no other rule and no second code path.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.parameters import ConfigParameter
from flows.session import Session, new_session, resumed_session, run_name
from flows.task_runner import LOCAL_TASKS
from flows.window import Window
from forge_core.config import RunConfig
from forge_core.runs import RunRef
from forge_core.runs.evaluation_schedule import evaluation_due, recorded_by
from tasks import STAGES, Stages, initialise


@flow(name="grpo", flow_run_name=run_name, task_runner=LOCAL_TASKS)
def grpo(config: ConfigParameter, overrides: dict[str, Any] | None = None) -> Any:
    """Train a language model with GRPO.

    Args:
        config: a file of configs/, another YAML file, or all values.
        overrides: keys to change, dotted, to their values, such as {"steps": 20, "training.learning_rate": 0.0001}.
    """
    with new_session(config, overrides or {}) as session:
        train_policy(session)
    return session.outcome


@flow(name="grpo-resume", flow_run_name="{run_id}", task_runner=LOCAL_TASKS)
def grpo_resume(
    run_id: str,
    store: str,
    overrides: dict[str, Any] | list[str] | None = None,
    allow_config_change: list[str] | None = None,
    allow_code_change: bool = False,
) -> Any:
    """Go on with a stored run, exactly where it stopped."""
    with resumed_session(run_id, store, overrides or {}, allow_config_change or [], allow_code_change) as session:
        train_policy(session)
    return session.outcome


def train_policy(session: Session) -> None:
    """Version 0, then every training step that is not committed yet."""
    initialise(session.run)
    iterate(session.run, STAGES, session.window, session.config, session.first_batch(), session.shards)


def iterate(run: RunRef, stages: Stages, window: Window, config: RunConfig, first_batch: int, shards: int) -> None:
    """The algorithm: training steps ``first_batch`` to ``config.steps - 1``."""
    trained: dict[int, Any] = {}
    evaluations: dict[int, list[Any]] = {}  # by the step that records them
    for b in range(first_batch, config.steps):
        window.committed(b - config.max_staleness - 1)
        before = [trained.pop(b - 1)] if b - 1 in trained else []
        rollouts = [stages.rollout.submit(run, b, shard) for shard in range(shards)]
        rewards = [stages.score.submit(run, b, rollout) for rollout in rollouts]
        refill = [stages.refill.submit(run, b, rewards)] if config.filters.dynamic_sampling else []
        reference = [stages.reference.submit(run, b, r) for r in refill or rollouts if config.grpo.beta > 0]
        if evaluation_due(config, b):  # sampled while training goes on; the step that records it waits for it
            sampled = [*before, *rollouts]
            evaluations[recorded_by(config, b)] = [stages.evaluate.submit(run, b, wait_for=sampled)]
        trained[b] = stages.train.submit(run, b, rollouts, rewards, refill, reference, wait_for=before)
        evaluation = evaluations.pop(b, [])
        window.open(
            b, trained[b], rollout=rollouts, score=rewards, refill=refill, reference=reference, evaluate=evaluation
        )
    window.drain()
