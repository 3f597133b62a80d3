"""Reference: log-probabilities of responses under the frozen reference model, published shard by shard."""

from prefect import task

from forge_core.runs import RunRef
from forge_core.runs.context import context_of
from forge_core.runs.refilling import accepted_groups
from forge_core.runs.stages import ShardRef, reference_shard
from tasks.options import OPTIONS


@task(name="reference", task_run_name="reference b={batch}", **OPTIONS)
def reference_logprobs(run: RunRef, batch: int, episodes: ShardRef | list[ShardRef]) -> list[ShardRef]:
    """``episodes``: one shard, or all of a refilled batch, of which only the accepted groups are computed."""
    ctx = context_of(run)
    if isinstance(episodes, ShardRef):
        return [reference_shard(ctx, episodes)]
    accepted = accepted_groups(ctx, ctx.rounds(batch))
    return [reference_shard(ctx, shard, accepted) for shard in episodes]
