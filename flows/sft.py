"""Supervised fine-tuning as a workflow: one task a training step, until all are taken or validation says enough.

Training step ``b`` takes ``training.sync_interval`` optimizer steps on the rows after the cursor of step ``b - 1`` and
makes version ``b + 1``. There is nothing to run ahead of it, so there is no window.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.parameters import SftParameter
from flows.sft_session import SftSession, new_sft_session, resumed_sft_session, sft_run_name
from flows.task_runner import LOCAL_TASKS
from tasks import initialise
from tasks.sft import fine_tune


@flow(name="sft", flow_run_name=sft_run_name, task_runner=LOCAL_TASKS)
def sft(config: SftParameter, overrides: dict[str, Any] | None = None) -> Any:
    """Fine-tune a language model on conversations.

    Args:
        config: a file of configs/, another YAML file, or all values.
        overrides: keys to change, dotted, to their values, such as {"steps": 20, "training.learning_rate": 0.0001}.
    """
    with new_sft_session(config, overrides or {}) as session:
        train_steps(session)
    return session.outcome


@flow(name="sft-resume", flow_run_name="{run_id}", task_runner=LOCAL_TASKS)
def sft_resume(
    run_id: str,
    store: str,
    overrides: dict[str, Any] | list[str] | None = None,
    allow_config_change: list[str] | None = None,
    allow_code_change: bool = False,
) -> Any:
    """Go on with a stored run, exactly where it stopped."""
    changes = (overrides or {}, allow_config_change or [], allow_code_change)
    with resumed_sft_session(run_id, store, *changes) as session:
        train_steps(session)
    return session.outcome


def train_steps(session: SftSession) -> None:
    """Version 0, then every training step that is not committed yet."""
    run, window = session.run, session.window
    initialise(run)
    for b in range(session.first_batch(), session.config.steps):
        if session.enough():
            break
        window.open(b, fine_tune.submit(run, b))
        window.committed(b)
