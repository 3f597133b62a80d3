"""Score: grade the episodes of one shard and publish their rewards."""

from prefect import task

from forge_core.runs import RunRef
from forge_core.runs.context import context_of
from forge_core.runs.stages import ShardRef, score_shard
from tasks.options import OPTIONS


@task(name="score", task_run_name="score b={batch} shard={episodes.shard}", **OPTIONS)
def score(run: RunRef, batch: int, episodes: ShardRef) -> ShardRef:
    """The rewards of a shard of episodes, graded unless they are stored."""
    return score_shard(context_of(run), episodes)
