"""What a training step consumes: the stored shards of its batch, every episode's fate, and the packed samples.

Invariants:
- The result is a pure function of stored objects and configuration, in plan order: a replay packs the same bytes.
- Advantages are computed once, when the step is first taken; a replay reads them from the ``training`` table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from forge_core.algorithms.advantages import build_estimator, compares, whitens
from forge_core.algorithms.fates import ENVIRONMENT, Fate, FateRules, decide_fates
from forge_core.algorithms.ops import Totals
from forge_core.config import RunConfig
from forge_core.data_model import TRAINING, Episode, from_parquet
from forge_core.runs.episodes import TRAINING_FILE, add_rewards, read_episodes, read_reference
from forge_core.runs.planning import planned_groups
from forge_core.runs.stages import seconds_of
from forge_core.store import layout
from forge_core.training.packing import Sample

if TYPE_CHECKING:
    from forge_core.runs.context import RunContext


@dataclass
class StepData:
    """One batch, read back from the store: the plans of its rounds; ``shards`` maps stage to prefixes; ``fates`` run in
    plan order."""

    batch: int
    plans: list[dict[str, Any]]
    shards: dict[str, list[str]]
    episodes: dict[str, Episode]
    reference: dict[str, list[float]]
    fates: list[Fate]

    @property
    def generated(self) -> list[Episode]:
        return list(self.episodes.values())


def shard_prefixes(ctx: RunContext, batch: int) -> dict[str, list[str]]:
    """The prefixes of the objects that a batch consists of, by stage."""
    stages = {"episodes": layout.episodes, "rewards": layout.rewards}
    if ctx.config.grpo.beta > 0:
        stages["reference"] = layout.reference
    shards = [(plan["round"], s) for plan in ctx.rounds(batch) for s in range(len(plan["shards"]))]
    named = {stage: [key(ctx.run_id, batch, r, s) for r, s in shards] for stage, key in stages.items()}
    return {"reference": [], **named}


def load_step(ctx: RunContext, batch: int) -> StepData:
    """The batch for its first training step: fates are decided here, and the staleness bound is checked. What is there
    of the next one is read meanwhile."""
    data = _whole(ctx, batch)
    ctx.ahead.begin(batch + 1, partial(_read_ahead, ctx, batch + 1))
    groups = [group for plan in data.plans for group in planned_groups(ctx.run_id, plan)]
    missing = _broken(ctx, data.shards["episodes"]) if ctx.config.environment else {}
    data.fates = decide_fates(groups, data.episodes, ctx.record.sampled_batch(batch), fate_rules(ctx.config), missing)
    return data


def _whole(ctx: RunContext, batch: int) -> StepData:
    """The batch as it was read ahead, unless there is more of it by now (a refill)."""
    shards, ahead = shard_prefixes(ctx, batch), ctx.ahead.take(batch)
    if ahead is None or ahead.shards != shards:
        return _load(ctx, batch, shards)
    return replace(ahead, plans=ctx.rounds(batch))


def _read_ahead(ctx: RunContext, batch: int) -> StepData | None:
    """The batch, if it is planned and all of it is there."""
    if ctx.stored_plan(batch, 0) is None:
        return None
    shards = shard_prefixes(ctx, batch)
    there = all(ctx.store.published(prefix) for prefixes in shards.values() for prefix in prefixes)
    return _load(ctx, batch, shards) if there else None


def _broken(ctx: RunContext, prefixes: list[str]) -> dict[str, str]:
    """The episodes whose environment failed."""
    manifests = [ctx.shards.open_published(prefix).manifest for prefix in prefixes]
    return {episode_id: ENVIRONMENT for m in manifests for episode_id in (m.provenance or {}).get("broken", {})}


def fate_rules(config: RunConfig) -> FateRules:
    """The rules that the configuration sets."""
    wanted = config.groups_per_batch if config.filters.dynamic_sampling else None
    section = config.advantage
    return FateRules(
        config.max_staleness,
        _none if config.distils else build_estimator(section),
        wanted,
        config.filters.truncated,
        compares(section) and not config.distils,
        whitens(section) and not config.distils,
        config.training.entropy_coef > 0,
    )


def _none(rewards: Sequence[float]) -> list[float]:
    """The advantages of rewards that only measure: the teacher's take their place in the loss."""
    return [0.0] * len(rewards)


def load_committed(ctx: RunContext, entry: dict[str, Any]) -> StepData:
    """The batch of a committed step, as it was trained: fates come from its ``training`` table."""
    data = _load(ctx, entry["batch"], entry["shards"])
    name = f"{entry['training']}{TRAINING_FILE}"
    rows = from_parquet(ctx.store.open_published(entry["training"]).read(TRAINING_FILE), TRAINING, name)
    data.fates = [Fate(**row) for row in rows]
    return data


def _load(ctx: RunContext, batch: int, shards: dict[str, list[str]]) -> StepData:
    episodes: dict[str, Episode] = {}
    for episode_prefix, reward_prefix in zip(shards["episodes"], shards["rewards"], strict=True):
        rows = read_episodes(ctx.shards, episode_prefix)
        add_rewards(ctx.shards, reward_prefix, rows)
        episodes |= {e.episode_id: e for e in rows}
    reference: dict[str, list[float]] = {}
    for prefix in shards["reference"]:
        reference |= read_reference(ctx.shards, prefix)
    return StepData(batch, ctx.rounds(batch), shards, episodes, reference, [])


def optimizer_batches(data: StepData, config: RunConfig) -> list[tuple[list[Sample], Totals]]:
    """The samples and global denominators of each optimizer step, in plan order."""
    alive = [g["group"] for plan in data.plans for g in plan["groups"] if g["skipped"] is None]
    if config.filters.dynamic_sampling:  # the accepted groups are the batch
        accepted = {_group_of(f) for f in data.fates if f.trained}
        alive = [group for group in alive if group in accepted]
    size = config.episodes_per_optimizer_step // config.grpo.n_samples
    chunks = [set(alive[i : i + size]) for i in range(0, len(alive), size)]
    return [_optimizer_batch(data, chunk, config.rollout.max_new_tokens) for chunk in chunks]


def _group_of(fate: Fate) -> int:
    return int(fate.episode_id.split("/")[-2])


def _optimizer_batch(data: StepData, groups: set[int], horizon: int) -> tuple[list[Sample], Totals]:
    fates = [f for f in data.fates if _group_of(f) in groups]
    counted = [f for f in fates if f.loss_tokens]
    totals = Totals(sum(f.loss_tokens for f in counted), len(counted), horizon)
    samples = [_sample(data.episodes[f.episode_id], f, data.reference.get(f.episode_id)) for f in fates if f.trained]
    return samples, totals


def _sample(e: Episode, fate: Fate, reference: list[float] | None) -> Sample:
    before = [0.0] * len(e.prompt_ids)
    return Sample(
        tokens=e.prompt_ids + e.response_ids,
        loss_mask=[False] * len(e.prompt_ids) + e.response_mask,
        weights=before + [fate.advantage] * len(e.response_ids),
        generator_logprobs=before + e.response_logprobs,
        ref_logprobs=None if reference is None else before + reference,
        crossed=len({span.version for span in e.version_spans}) > 1,
    ).in_arrays()


def episode_counts(fates: Iterable[Fate]) -> dict[str, Any]:
    """``planned``, ``trained`` and ``dropped`` by reason; planned = trained + dropped."""
    fates = list(fates)
    reasons = [f.dropped for f in fates if f.dropped]
    dropped = {reason: reasons.count(reason) for reason in sorted(set(reasons))}
    return {"planned": len(fates), "trained": sum(f.trained for f in fates), "dropped": dropped}


def data_metrics(data: StepData, *, played: bool) -> dict[str, float]:
    """Metrics that need no model: rewards by component, lengths, truncation, ages. ``played``: whether the episodes are
    those of an environment."""
    generated = data.generated
    graded = [e for e in generated if e.reward is not None]
    rewards = [e.reward for e in graded if e.reward is not None]
    metrics = {"reward/mean": fmean(rewards) if rewards else 0.0, "reward/std": pstdev(rewards) if rewards else 0.0}
    for name in sorted({name for e in graded for name in e.components}):
        metrics[f"reward/{name}/mean"] = fmean(e.components[name] for e in graded if name in e.components)
    lengths = [len(e.response_ids) for e in generated]
    metrics["response/mean_tokens"] = fmean(lengths) if lengths else 0.0
    truncated = [e.finish_reason == "length" for e in generated]
    metrics["response/truncated_share"] = fmean(truncated) if truncated else 0.0
    metrics |= environment_metrics(generated) if played else {}
    ages = [f.age for f in data.fates if f.trained]
    metrics["age/mean"] = fmean(ages) if ages else 0.0
    return metrics


def environment_metrics(episodes: list[Episode]) -> dict[str, float]:
    """Means over the episodes of what their environments counted: turns, reward, calls of tools, …"""
    played = [e.metadata["environment"] for e in episodes]
    names = sorted({name for one in played for name in one} - {"transcript"})
    metrics = {f"environment/{name}": fmean(one.get(name, 0.0) for one in played) for name in names}
    if played:
        metrics["environment/sampled_tokens"] = fmean(sum(e.response_mask) for e in episodes)
    return metrics


def stage_seconds(ctx: RunContext, data: StepData) -> dict[str, float]:
    """Working seconds of the stages that made this batch."""
    stages = {"time/generate": "episodes", "time/score": "rewards", "time/reference": "reference"}
    return {name: seconds_of(ctx, data.shards[stage]) for name, stage in stages.items()}
