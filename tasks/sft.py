"""Supervised training: take one training step on the rows that follow, publish the new version and commit it."""

from typing import cast

from prefect import task

from forge_core.runs import RunRef
from forge_core.runs.context import context_of
from forge_core.runs.sft import train_rows
from forge_core.runs.sft_context import SftContext
from tasks.options import OPTIONS


@task(name="fine-tune", task_run_name="fine-tune b={batch}", **OPTIONS)
def fine_tune(run: RunRef, batch: int) -> int:
    """Returns the committed version."""
    return train_rows(cast(SftContext, context_of(run)), batch)["version_out"]
