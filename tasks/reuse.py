"""Reuse: stored episodes of another run, published again under this one, with what was computed from them."""

from prefect import task

from forge_core.runs import RunRef
from forge_core.runs.context import context_of
from forge_core.runs.redo import reuse_batch, reuse_reference
from forge_core.runs.stages import ShardRef
from tasks.options import OPTIONS


@task(name="reuse", task_run_name="reuse b={batch}", **OPTIONS)
def reuse(run: RunRef, batch: int) -> list[ShardRef]:
    """The episode shards of all rounds of a batch."""
    return reuse_batch(context_of(run), batch)


@task(name="reuse-reference", task_run_name="reference b={batch}", **OPTIONS)
def reuse_or_compute_reference(run: RunRef, batch: int, episodes: list[ShardRef]) -> list[ShardRef]:
    """Reference log-probabilities of ``episodes``: the parent's where the reference is the same, else computed."""
    return reuse_reference(context_of(run), batch, episodes)
