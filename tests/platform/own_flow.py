"""A flow of one's own: sample and grade the next batch of a stored run, without training on it, and show a table."""

from prefect import flow
from prefect.artifacts import create_table_artifact

from forge_core.runs import RunRef
from forge_core.runs.context import RunContext, attach, detach
from forge_core.runs.episodes import add_rewards, read_episodes
from forge_core.runs.planning import shard_count
from forge_core.runs.record import load_run
from forge_core.store import open_store
from tasks import STAGES


@flow
def preview(run_id: str, store: str) -> int:
    run, opened = RunRef(run_id, store), open_store(store)
    ctx = RunContext(opened, load_run(opened, run_id), role="generator")
    attach(run, ctx)  # the tasks of this process find it under `run`; engines load when first used
    try:
        batch = ctx.ledger.head()  # the newest version, which samples the batch of the same number
        shards = [STAGES.rollout.submit(run, batch, shard) for shard in range(shard_count(ctx.config))]
        graded = [STAGES.score.submit(run, batch, shard) for shard in shards]
        rows = []
        for shard, rewards in zip(shards, graded, strict=True):
            episodes = read_episodes(opened, shard.result().prefix)
            add_rewards(opened, rewards.result().prefix, episodes)
            rows += [{"prompt": e.messages[-1]["content"], "answer": e.text, "reward": e.reward} for e in episodes]
        create_table_artifact(rows, key="preview", description=f"Batch {batch} of {run_id}")
        return len(rows)
    finally:
        detach(run)
        ctx.close()
