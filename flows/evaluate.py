"""Evaluate one pinned policy on held-out prompts, and compare it with another.

Invariants:
- What was evaluated before is not evaluated again: an evaluation is stored under the digest of weights, prompts,
  sampling and rewards, whoever asked for it.
- A flow run of the deployment that crashed, or whose machine was taken, is started again as any other (``restarting``);
  one that was started ``CRASHES`` times more than once fails, which ends the circle.
"""

from __future__ import annotations

import io
from typing import Any

from prefect import flow, runtime
from prefect.states import Completed

from flows.announcing import announce, show
from flows.output import outlive_readers
from flows.parameters import ConfigParameter
from flows.restarting import CRASHES, is_deployed, stopped_state
from flows.stoppable import stoppable
from forge_core.config import ConfigError
from forge_core.evaluation.asking import Question, asked
from forge_core.evaluation.plot import evaluation_png
from forge_core.evaluation.results import Evaluation, compare, read_evaluation, summarise
from forge_core.evaluation.tables import comparison_line, markdown, table
from forge_core.stop import Stopped
from tasks.evaluate_model import evaluate_model

REGRESSED = "forge.eval.regressed"


@flow(name="evaluate", flow_run_name="evaluate {model}")
def evaluate(
    model: str,
    config: ConfigParameter | None = None,
    overrides: dict[str, Any] | None = None,
    store: str | None = None,
    against: str | None = None,
) -> Any:
    """Evaluate ``model`` (run://RUN_ID/VERSION, model://NAME, a folder or a hub id), and ``against``, if given.

    ``config``: whose prompts, rewards and ``eval`` settings; left out: those of the model's run.
    """
    outlive_readers()
    _refuse_circles(runtime.flow_run.run_count)
    question = asked(model, config, overrides or {}, store, against)
    try:
        with stoppable(question.store, question.run_id, runtime.flow_run.id) as stop:
            prefixes = [evaluate_model(question.store.uri, question.config, p, stop) for p in question.policies]
    except Stopped as stopped:
        return stopped_state(stopped, f"{stopped}; what was evaluated is kept", restarted=is_deployed())
    return Completed(message=_told(question, [read_evaluation(question.store, prefix) for prefix in prefixes]))


def _refuse_circles(starts: int) -> None:
    if starts > 1 + CRASHES:
        raise ConfigError(
            f"this evaluation was started {starts} times and did not end: look into the log for the cause"
        )


def _told(question: Question, evaluations: list[Evaluation]) -> str:
    """One line about the result, which is announced; a model that is worse with confidence has regressed."""
    summaries = [summarise(evaluation) for evaluation in evaluations]
    comparison = compare(evaluations[0], evaluations[1]) if len(evaluations) == 2 else None
    regressed = comparison is not None and comparison.gain.high < 0
    names = [policy.name for policy in question.policies]
    line = comparison_line(names, summaries, comparison)
    payload = {
        "policies": names,
        "evaluations": [e.prefix for e in evaluations],
        "rewards": [s.reward.mean for s in summaries],
    }
    event = REGRESSED if regressed else "forge.eval.done"
    announce(event, question.subject, payload, markdown(names, summaries, comparison))
    picture = io.BytesIO()
    evaluation_png(names, summaries, picture)
    show(question.subject, table(names, summaries), picture.getvalue())
    return line
