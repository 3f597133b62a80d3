"""GRPO as a workflow: rollout, score, reference and train tasks under a staleness window.

Training step ``b`` turns policy version ``b`` into ``b + 1``. Batch ``b`` may be sampled by any version ``>= b - S``
(``S = max_staleness``), so opening batch ``b`` waits for training step ``b - S - 1``: ``S = 0`` is on-policy, a larger
``S`` lets generation run ahead. There is no other rule and no second code path.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.session import Session, open_session
from flows.window import Window
from forge_core.config import RunConfig
from forge_core.runs import RunRef
from tasks import STAGES, Stages


def iterate(run: RunRef, stages: Stages, window: Window, config: RunConfig, first_batch: int, shards: int) -> None:
    """The algorithm: run training steps ``first_batch`` to ``config.steps - 1``."""
    trained: dict[int, Any] = {}
    for b in range(first_batch, config.steps):
        window.committed(b - config.max_staleness - 1)
        rollouts = [stages.rollout.submit(run, b, shard) for shard in range(shards)]
        rewards = [stages.score.submit(run, b, rollout) for rollout in rollouts]
        reference = [stages.reference.submit(run, b, rollout) for rollout in rollouts if config.grpo.beta > 0]
        evaluation = [stages.evaluate.submit(run, v) for v in versions_to_evaluate(config, b)]
        before = [trained.pop(b - 1)] if b - 1 in trained else []
        trained[b] = stages.train.submit(run, b, rollouts, rewards, reference, evaluation, wait_for=before)
        window.open(b, trained[b], rollout=rollouts, score=rewards, reference=reference, evaluate=evaluation)
    window.drain()


def versions_to_evaluate(config: RunConfig, batch: int) -> list[int]:
    """Versions to evaluate while batch ``batch`` is open: the initial one, and those ``eval.interval`` names.

    The last version is evaluated by the train task, just before it commits.
    """
    due = batch == 0 or (config.eval.interval > 0 and batch % config.eval.interval == 0)
    return [batch] if due and config.eval.prompts > 0 else []


@flow(name="grpo", flow_run_name="{run_id}", persist_result=False, validate_parameters=False)
def grpo_run(run_id: str, session: Session) -> Any:
    """One GRPO run inside an open session; ends Cancelled when it is stopped."""
    with session.stopping() as window:
        session.initialise()
        iterate(session.run, STAGES, window, session.config, session.first_batch(), session.shards)
    return session.final_state()


@flow(name="grpo")
def grpo(config: RunConfig | str, overrides: dict[str, Any] | None = None) -> Any:
    """Train with GRPO: ``config`` is a file or a model; ``overrides`` maps dotted keys to values."""
    with open_session(config, overrides or {}) as session:
        return session.state_of(grpo_run)
