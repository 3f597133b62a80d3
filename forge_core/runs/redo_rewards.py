"""Grading the stored episodes of a batch again.

Invariants:
- Shards are graded by the same code as a run's (``score_shard``): one request digest, one rule for outages.
- ``rescored/<batch>.json`` says what came of a batch, by ``put_new``, after its rewards were published: a batch that
  has it is finished, and batches are finished in order.
"""

from __future__ import annotations

from typing import Any

from forge_core.data_model import Episode
from forge_core.runs.consumption import StepData, data_metrics
from forge_core.runs.context import RunContext
from forge_core.runs.episodes import add_rewards, read_episodes
from forge_core.runs.record import now
from forge_core.runs.redo import Copier
from forge_core.runs.stages import ShardRef, score_shard
from forge_core.store import layout

SAME = 1e-9  # a smaller difference of two grades is none


def rescore_batch(ctx: RunContext, batch: int, shards: list[ShardRef]) -> dict[str, Any]:
    """Grade the ``shards`` of a batch unless that is done; returns the batch's entry."""
    key = layout.rescored(ctx.run_id, batch)
    if ctx.store.exists(key):
        return ctx.store.read_json(key)
    started_at = now()
    rewards = [score_shard(ctx, shard) for shard in shards]
    ctx.store.put_new_json(key, {**_entry(ctx, batch, shards, rewards), "started_at": started_at, "finished_at": now()})
    entry = ctx.store.read_json(key)
    for observer in ctx.observers:
        observer(entry)
    return entry


def _entry(ctx: RunContext, batch: int, shards: list[ShardRef], rewards: list[ShardRef]) -> dict[str, Any]:
    copier, changed = Copier(ctx, batch), 0
    episodes: dict[str, Episode] = {}
    before: list[float] = []
    for shard, graded in zip(shards, rewards, strict=True):
        rows = read_episodes(ctx.shards, shard.prefix)
        add_rewards(ctx.shards, graded.prefix, rows)
        old = copier.rewards(shard.round, shard.shard)
        changed += len([e for e in rows if _differ(e.reward, old[copier.ids.original(e.episode_id)])])
        before += [reward for reward in old.values() if reward is not None]
        episodes |= {e.episode_id: e for e in rows}
    named = {"episodes": [s.prefix for s in shards], "rewards": [r.prefix for r in rewards], "reference": []}
    metrics = data_metrics(StepData(batch, [], named, episodes, {}, []), played=ctx.config.environment is not None)
    metrics.pop("age/mean")
    return {
        "batch": batch,
        "plans": [layout.plan(ctx.run_id, batch, round) for round in sorted({s.round for s in shards})],
        "shards": named,
        "episodes": len(episodes),
        "failed": len([e for e in episodes.values() if e.reward is None]),
        "changed": changed,
        "tokens": sum(sum(e.response_mask) for e in episodes.values()),
        "metrics": {**metrics, "parent/reward/mean": sum(before) / len(before) if before else 0.0},
        "attempt": ctx.attempt,
    }


def _differ(a: float | None, b: float | None) -> bool:
    return (a is None) != (b is None) or (a is not None and b is not None and abs(a - b) > SAME)
