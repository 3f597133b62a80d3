"""Initialise: publish version 0 (with its warm start, if there is one)."""

from prefect import task

from forge_core.runs import RunRef
from forge_core.runs.context import context_of
from forge_core.runs.initialise import initialise as make_version_zero
from tasks.options import OPTIONS


@task(name="initialise", task_run_name="initialise v=0", **OPTIONS)
def initialise(run: RunRef) -> None:
    """Version 0, unless it is there: the run's model, after its warm start."""
    make_version_zero(context_of(run))
