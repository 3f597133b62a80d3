"""Train: take one training step on a batch's stored shards, publish the new version and commit it."""

from prefect import task

from forge_core.runs import RunRef
from forge_core.runs.context import context_of
from forge_core.runs.stages import ShardRef
from forge_core.runs.training import train_batch
from tasks.options import OPTIONS


@task(name="train", task_run_name="train b={batch}", **OPTIONS)
def train(
    run: RunRef,
    batch: int,
    rollouts: list[ShardRef],
    rewards: list[ShardRef],
    refill: list[list[ShardRef]],
    reference: list[list[ShardRef]],
) -> int:
    """Returns the committed version. The shards are found through the plan; the arguments are the DAG's edges."""
    return train_batch(context_of(run), batch)["version_out"]
