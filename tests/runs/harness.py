"""A small real run, driven stage by stage without Prefect: real engines, real store, seconds instead of minutes."""

from __future__ import annotations

import uuid
from typing import Any, TypeVar

from forge_core.config import RunConfig, load_config
from forge_core.runs.context import RunContext
from forge_core.runs.initialise import initialise
from forge_core.runs.planning import shard_count
from forge_core.runs.record import create_run, load_run
from forge_core.runs.stages import reference_shard, sample_shard, score_shard
from forge_core.runs.training import train_batch
from forge_core.store import Store, open_store

TINY: dict[str, Any] = {
    "run": {"id": "tiny", "seed": 3},
    "steps": 4,
    "model": {
        "vocabulary": "0123456789+=,:darst",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 16,
    },
    "dataset": {"path": "python://forge_core.data.sort_digits:prompts", "options": {"size": 200}},
    "training": {"batch_size": 32, "learning_rate": 1e-2, "seq_len": 16, "token_budget": 1024, "threads": 1},
    "grpo": {"n_samples": 4, "beta": 0.0},
    "generator": {"threads": 1},
    "rollout": {"max_new_tokens": 6, "shards": 2, "version": "oldest"},
    "rewards": {"functions": [{"path": "tests.runs.rewards:first_digit"}]},
    "eval": {"prompts": 8, "interval": 2},
    "checkpoint": {"interval": 2},
}


OPENED: list[RunContext] = []
C = TypeVar("C", bound=RunContext)


def opened(ctx: C) -> C:
    """``ctx``, to be closed when its test ends."""
    OPENED.append(ctx)
    return ctx


def memory() -> str:
    """A store of its own, in memory."""
    return f"memory://{uuid.uuid4().hex}"


def tiny(*overrides: str) -> RunConfig:
    return load_config(TINY, list(overrides))


def new_run(store: Store | str, *overrides: str) -> RunContext:
    store = open_store(store) if isinstance(store, str) else store
    return opened(RunContext(store, create_run(store, tiny(*overrides))))


def reopened(ctx: RunContext) -> RunContext:
    """The same run as another process would open it."""
    again = opened(RunContext(ctx.store, load_run(ctx.store, ctx.run_id)))
    again.rollouts.begin(max(0, again.ledger.head()))
    return again


def make_batch(ctx: RunContext, batch: int) -> None:
    """Everything before the training step."""
    for shard in range(shard_count(ctx.config)):
        episodes = sample_shard(ctx, batch, shard)
        score_shard(ctx, episodes)
        if ctx.config.grpo.beta > 0:
            reference_shard(ctx, episodes)


def advance(ctx: RunContext, until: int) -> RunContext:
    """Run training steps up to version ``until``, in the order that the window allows."""
    initialise(ctx)
    lead = ctx.config.max_staleness
    first = max(0, ctx.ledger.head())
    for batch in range(first, until):
        for ahead in range(batch, min(batch + lead + 1, until)):
            if ahead == batch + lead or batch == first:
                make_batch(ctx, ahead)
        train_batch(ctx, batch)
    return ctx


def decided(ctx: RunContext) -> list[dict[str, Any]]:
    """The ledger without times and attempts."""
    entries = []
    for entry in ctx.ledger.entries():
        metrics = {k: v for k, v in entry["metrics"].items() if not k.startswith("time/")}
        named = {k: entry[k].rsplit("-", 1)[0] for k in ("weights", "training", "adapter") if k in entry}
        left_out = ("started_at", "finished_at", "attempt")
        entries.append({**{k: v for k, v in entry.items() if k not in left_out}, **named, "metrics": metrics})
    return entries
