"""Rollout: sample the responses of one shard of a batch and publish them as episodes."""

from prefect import task

from forge_core.runs import RunRef
from forge_core.runs.context import context_of
from forge_core.runs.stages import ShardRef, sample_shard, sampling_version
from tasks.options import OPTIONS, argument, context


def name() -> str:
    round = f" round={argument('round')}" if argument("round") else ""
    version = sampling_version(context(), argument("batch"))
    return f"rollout b={argument('batch')} v={version} shard={argument('shard')}{round}"


@task(name="rollout", task_run_name=name, **OPTIONS)
def rollout(run: RunRef, batch: int, shard: int, round: int = 0) -> ShardRef:
    """The episodes of one shard of a round of ``batch``, sampled unless they are stored."""
    return sample_shard(context_of(run), batch, shard, round)
