"""Dynamic sampling: refill a batch whose groups lack signal (DAPO, arXiv 2503.14476), round by round.

Invariants:
- At most ``filters.max_rounds`` extra rounds; then the step trains with what it has.
- A round is planned from stored rewards and a stream of its own, so it is the same after a crash, and the next batch
  does not depend on it.
- Refilled episodes obey the staleness bound like all others: they are sampled by a version of the same window.
"""

from __future__ import annotations

from typing import Any

from forge_core.algorithms.fates import group_has_signal
from forge_core.data_model import Episode
from forge_core.runs.context import RunContext
from forge_core.runs.episodes import add_rewards, read_episodes
from forge_core.runs.planning import planned_groups, shard_count
from forge_core.runs.stages import ShardRef, sample_planned, score_shard
from forge_core.store import layout
from forge_core.store.plans import put_plan


def refill(ctx: RunContext, batch: int) -> list[ShardRef]:
    """Generate and grade extra rounds until ``batch`` has its groups with signal; the episode shards of all rounds."""
    plans = [ctx.plan(batch)]
    shards = _shards(ctx, plans[0])
    for round in range(1, ctx.config.filters.max_rounds + 1):
        missing = ctx.config.groups_per_batch - len(accepted_groups(ctx, plans))
        if missing <= 0:
            break
        first_group = sum(len(plan["groups"]) for plan in plans)
        plan = ctx.stored_plan(batch, round) or ctx.planner.refill(batch, round, first_group, missing)
        plans.append(put_plan(ctx.store, ctx.run_id, batch, round, plan))
        for shard in range(len(plan["shards"])):
            shards.append(sample_planned(ctx, plans[-1], shard))
            score_shard(ctx, shards[-1])
    ctx.rollouts.finish(batch, shard_count(ctx.config))
    return shards


def _shards(ctx: RunContext, plan: dict[str, Any]) -> list[ShardRef]:
    return [sample_planned(ctx, plan, shard) for shard in range(len(plan["shards"]))]


def accepted_groups(ctx: RunContext, plans: list[dict[str, Any]]) -> list[str]:
    """Ids of the groups with signal, in plan order, at most as many as a batch has."""
    found = []
    for plan in plans:
        episodes = _graded(ctx, plan)
        groups = planned_groups(ctx.run_id, plan)
        found += [g.episode_ids[0].rpartition("/")[0] for g in groups if group_has_signal(g, episodes)]
    return found[: ctx.config.groups_per_batch]


def _graded(ctx: RunContext, plan: dict[str, Any]) -> dict[str, Episode]:
    episodes: dict[str, Episode] = {}
    for shard in range(len(plan["shards"])):
        where = (ctx.run_id, plan["batch"], plan["round"], shard)
        rows = read_episodes(ctx.store, layout.episodes(*where))
        add_rewards(ctx.store, layout.rewards(*where), rows)
        episodes |= {e.episode_id: e for e in rows}
    return episodes
