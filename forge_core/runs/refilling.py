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
from forge_core.data.cursor import Cursor
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
    while not is_full(ctx, plans):
        plans.append(plan_refill(ctx, batch, plans))
        for shard in range(len(plans[-1]["shards"])):
            shards.append(sample_planned(ctx, plans[-1], shard))
            score_shard(ctx, shards[-1])
    ctx.rollouts.finish(batch, shard_count(ctx.config))
    return shards


def is_full(ctx: RunContext, plans: list[dict[str, Any]]) -> bool:
    """Whether a batch, whose rounds ``plans`` are sampled and graded, needs no further round, or may have none."""
    section = ctx.config.filters
    return not section.dynamic_sampling or len(plans) > section.max_rounds or _missing(ctx, plans) <= 0


def plan_refill(ctx: RunContext, batch: int, plans: list[dict[str, Any]]) -> dict[str, Any]:
    """The plan of the round after ``plans``, made and stored now if nobody did before."""
    round = len(plans)
    first_group = sum(len(plan["groups"]) for plan in plans)
    stored = ctx.stored_plan(batch, round)
    begun = Cursor(**plans[0]["cursor"]["before"])
    plan = stored or ctx.planner.refill(batch, round, first_group, _missing(ctx, plans), begun, ctx.signal(batch))
    return put_plan(ctx.store, ctx.run_id, batch, round, plan)


def _missing(ctx: RunContext, plans: list[dict[str, Any]]) -> int:
    return ctx.config.groups_per_batch - len(accepted_groups(ctx, plans))


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
        rows = read_episodes(ctx.shards, layout.episodes(*where))
        add_rewards(ctx.shards, layout.rewards(*where), rows)
        episodes |= {e.episode_id: e for e in rows}
    return episodes
