"""Evaluate: sample and grade held-out prompts with one pinned version."""

from prefect import task

from forge_core.runs import RunRef
from forge_core.runs.context import context_of
from forge_core.runs.evaluation import evaluate as evaluate_version
from tasks.options import OPTIONS


@task(name="evaluate", task_run_name="evaluate v={version}", **OPTIONS)
def evaluate(run: RunRef, version: int) -> str:
    """Returns the prefix of the evaluation of ``version``; one that is stored is not made again."""
    return evaluate_version(context_of(run), version)
