"""Rescore: grade the stored episodes of a batch again, and commit what came of it."""

from prefect import task

from forge_core.runs import RunRef
from forge_core.runs.context import context_of
from forge_core.runs.redo_rewards import rescore_batch
from forge_core.runs.stages import ShardRef
from tasks.options import OPTIONS


@task(name="rescore", task_run_name="rescore b={batch}", **OPTIONS)
def rescore(run: RunRef, batch: int, episodes: list[ShardRef]) -> int:
    """Grade ``episodes``, all of ``batch``, with the rewards of ``run``. Returns the batch."""
    return rescore_batch(context_of(run), batch, episodes)["batch"]
