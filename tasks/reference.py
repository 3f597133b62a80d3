"""Reference: log-probabilities of one shard's responses under the frozen reference model, published."""

from prefect import task

from forge_core.runs import RunRef
from forge_core.runs.context import context_of
from forge_core.runs.stages import ShardRef, reference_shard
from tasks.options import OPTIONS


@task(name="reference", task_run_name="reference b={batch} shard={episodes.shard}", **OPTIONS)
def reference_logprobs(run: RunRef, batch: int, episodes: ShardRef) -> ShardRef:
    return reference_shard(context_of(run), episodes)
