"""Refill: with dynamic sampling, generate and grade extra rounds until a batch has its groups with signal."""

from prefect import task

from forge_core.runs import RunRef
from forge_core.runs.context import context_of
from forge_core.runs.refilling import refill as refill_batch
from forge_core.runs.stages import ShardRef
from tasks.options import OPTIONS


@task(name="refill", task_run_name="refill b={batch}", **OPTIONS)
def refill(run: RunRef, batch: int, rewards: list[ShardRef]) -> list[ShardRef]:
    """Returns the episode shards of all rounds."""
    return refill_batch(context_of(run), batch)
