"""The work of the stages before training: sample, grade, reference log-probabilities.

Invariants:
- A stage whose object exists with the same ``request`` digest is not done again.
- ``request`` is known before the work; versions, times and the machine are provenance.
- Two workers may do the same shard; the first manifest wins and the other adopts it.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forge_core.algorithms.fates import StalenessError
from forge_core.config import RunConfig
from forge_core.data.errors import DataError
from forge_core.data.prompts import Prompt
from forge_core.data_model import SCHEMA_VERSION, Completion, Episode
from forge_core.rewards.actor import Graded, RewardItem
from forge_core.rewards.identity import reward_identity as identity_of
from forge_core.rewards.resolve import RewardError
from forge_core.runs.episodes import (
    EPISODES_FILE,
    REFERENCE_FILE,
    REWARDS_FILE,
    episode_row,
    episodes_bytes,
    read_episodes,
    reference_bytes,
    rewards_bytes,
)
from forge_core.runs.planning import shard_groups, shard_requests
from forge_core.runs.record import refuse_generation
from forge_core.runs.recording import recording
from forge_core.runs.reference_session import reference_digest
from forge_core.runs.responding import environment_identity, is_broken, respond
from forge_core.store import Manifest, digest, layout

if TYPE_CHECKING:
    from forge_core.runs.context import RunContext


@dataclass(frozen=True)
class ShardRef:
    """What a stage returns: which shard, the prefix of its object, the digest of its content."""

    batch: int
    shard: int
    prefix: str
    content: str
    round: int = 0


def sampling_version(ctx: RunContext, batch: int, newest: int | None = None) -> int:
    """The version that samples ``batch``: the newest one that engines may move to (``newest``, where it is known), or
    exactly ``batch - S`` (``oldest``)."""
    oldest = max(0, batch - ctx.config.max_staleness)
    if ctx.config.rollout.version == "oldest":
        return oldest
    newest = ctx.evaluations.newest_allowed(ctx.ledger.head()) if newest is None else newest
    return max(oldest, min(newest, batch))


def sample_shard(ctx: RunContext, batch: int, shard: int, round: int = 0) -> ShardRef:
    """Generate the episodes of one shard and publish them. The plan of its round is there, or it is round 0."""
    done = sample_planned(ctx, ctx.rounds(batch)[round] if round else ctx.plan(batch), shard)
    ctx.rollouts.finish(batch, shard)
    return done


def sample_planned(ctx: RunContext, plan: dict[str, Any], shard: int) -> ShardRef:
    """Generate the episodes of one shard of a plan and publish them."""
    refuse_generation(ctx.record)
    batch, round = plan["batch"], plan["round"]
    prefix = layout.episodes(ctx.run_id, batch, round, shard)
    request = _sample_request(ctx, plan, shard)
    if not ctx.store.published(prefix):
        with recording(ctx) as recorded:
            files, provenance = _sample(ctx, plan, shard)
            provenance = {**recorded(), **provenance}
        ctx.shards.keep(ctx.store.publish(prefix, files, request=request, provenance=provenance))
    manifest = ctx.shards.open_published(prefix, request=request).manifest
    return ShardRef(batch, shard, prefix, manifest.content, round)


def _sample_request(ctx: RunContext, plan: dict[str, Any], shard: int) -> str:
    prompts = [(g["prompt_id"], g["prompt_ids"], g["seeds"]) for g in shard_groups(plan, shard)]
    return digest(
        {
            "stage": "episodes",
            "schema": SCHEMA_VERSION,
            "prompts": prompts,
            "sampling": plan["sampling"],
            "tokenizer": ctx.tokenizer_digest,
            **environment_identity(ctx.config.environment),
        }
    )


def _sample(ctx: RunContext, plan: dict[str, Any], shard: int) -> tuple[dict[str, bytes], dict[str, Any]]:
    batch, started = plan["batch"], time.monotonic()
    if ctx.config.rollout.version == "oldest":
        ctx.rollouts.wait_before(batch, ctx.stop)
    oldest, newest = max(0, batch - ctx.config.max_staleness), ctx.evaluations.newest_allowed(ctx.ledger.head())
    version = sampling_version(ctx, batch, newest)
    if newest < oldest:
        ctx.evaluate(ctx, newest)  # or wait for it
    requests, prompts = shard_requests(ctx.run_id, plan, shard, oldest), _prompts(ctx, plan, shard)
    with ctx.sampling(version) as engine:
        working = time.monotonic()
        asked = {r.request_id: prompts[int(r.request_id.split("/")[-2])] for r in requests}
        completions = respond(ctx.config, ctx.play, engine, requests, asked, ctx.stop)
    _check_versions(ctx.config, batch, completions)
    rows = [
        episode_row(request, asked[request.request_id], completion)
        for request, completion in zip(requests, completions, strict=True)
        if completion.metadata["finish_reason"] != "aborted"
    ]
    ended = time.monotonic()
    version = min((c.metadata["policy_version"] for c in completions), default=version)
    provenance = {
        "policy_version": version,
        "policy_digest": ctx.weights_content(version),
        "backend": ctx.config.generator.backend,
        "seconds": ended - working,
        "waited_seconds": working - started,
        "finished_at_s": time.time(),
        "tokens": sum(sum(row["response_mask"]) for row in rows),
        "episodes": len(rows),
        "missing": len(requests) - len(rows),
        "broken": {c.metadata["request_id"]: c.metadata["dropped"] for c in completions if is_broken(c)},
    }
    return {EPISODES_FILE: episodes_bytes(rows)}, provenance


def _prompts(ctx: RunContext, plan: dict[str, Any], shard: int) -> dict[int, Prompt]:
    """The prompt of each group. Raises DataError when the data set is not the one that was planned with."""
    groups = shard_groups(plan, shard)
    prompts = {g["group"]: ctx.prompts[g["row"]] for g in groups}
    for group in groups:
        if prompts[group["group"]].prompt_id != group["prompt_id"]:
            raise DataError(
                f"dataset.path: row {group['row']} is not the prompt that batch {plan['batch']} was planned with: "
                "the data set changed since; restore it, or start a new run"
            )
    return prompts


def _check_versions(config: RunConfig, batch: int, completions: list[Completion]) -> None:
    oldest = min((c.metadata["policy_version"] for c in completions), default=batch)
    if oldest < batch - config.max_staleness:
        raise StalenessError(
            f"the generator sampled batch {batch} with version {oldest}; max_staleness={config.max_staleness} allows "
            f"{batch - config.max_staleness} at least"
        )


def score_shard(ctx: RunContext, episodes: ShardRef) -> ShardRef:
    """Grade one shard and publish its rewards. Raises RewardError when too many grades failed."""
    prefix = layout.rewards(ctx.run_id, episodes.batch, episodes.round, episodes.shard)
    request = _score_request(ctx.config, episodes.content)
    if not ctx.store.published(prefix):
        rows = read_episodes(ctx.shards, episodes.prefix)
        started = time.monotonic()
        with recording(ctx) as recorded:
            graded, metrics = ctx.rewards.grade_with_metrics([reward_item(e) for e in rows], stop=ctx.stop)
            provenance = {
                "seconds": time.monotonic() - started,
                "episodes": len(rows),
                "grading": metrics,
                **recorded(),
            }
        refuse_outage(ctx.config, prefix, graded)
        files = {REWARDS_FILE: rewards_bytes(rows, graded)}
        ctx.shards.keep(ctx.store.publish(prefix, files, request=request, provenance=provenance))
    manifest = ctx.shards.open_published(prefix, request=request).manifest
    return replace(episodes, prefix=prefix, content=manifest.content)


def _score_request(config: RunConfig, content: str) -> str:
    return digest(
        {"stage": "rewards", "schema": SCHEMA_VERSION, "functions": reward_identity(config), "episodes": content}
    )


def reward_identity(config: RunConfig) -> list[dict[str, Any]]:
    """What decides a grade (``forge_core.rewards.identity``)."""
    return identity_of(config.rewards.functions)


def grade(ctx: RunContext, episodes: list[Episode]) -> list[Graded]:
    """The rewards of ``episodes``, in order."""
    return ctx.rewards.grade_many([reward_item(e) for e in episodes], stop=ctx.stop)


def reward_item(e: Episode) -> RewardItem:
    prompt = e.messages[-1]["content"] if e.messages else ""
    metadata = {
        **e.metadata,
        "answer": e.target,
        "task": e.task,
        "finish_reason": e.finish_reason,
        "prompt_messages": e.messages,
        "response_tokens": sum(e.response_mask),
    }
    return RewardItem(prompt, e.text, metadata)


def refuse_outage(config: RunConfig, prefix: str, graded: list[Graded]) -> None:
    """Raise RewardError when too many grades of what is to become ``prefix`` failed: an outage must not become data."""
    failed = [g for g in graded if g.reward is None]
    if graded and len(failed) / len(graded) > config.rewards.max_error_share:
        raise RewardError(
            f"{prefix}: {len(failed)} of {len(graded)} grades failed, more than rewards.max_error_share="
            f"{config.rewards.max_error_share}; the first: {failed[0].error}"
        )


def reference_request(ctx: RunContext, content: str, accepted: Collection[str] | None) -> str:
    """The request of reference log-probabilities for episodes with the digest ``content``."""
    return digest(
        {
            "stage": "reference",
            "schema": SCHEMA_VERSION,
            "model": reference_digest(ctx),
            "episodes": content,
            "accepted": None if accepted is None else sorted(accepted),
            "temperature": ctx.config.grpo.temperature,
        }
    )


def reference_shard(ctx: RunContext, episodes: ShardRef, accepted: Collection[str] | None = None) -> ShardRef:
    """Compute and publish the reference log-probabilities of one shard, or of its ``accepted`` groups."""
    prefix = layout.reference(ctx.run_id, episodes.batch, episodes.round, episodes.shard)
    request = reference_request(ctx, episodes.content, accepted)
    if not ctx.store.published(prefix):
        rows = [e for e in read_episodes(ctx.shards, episodes.prefix) if accepted is None or e.group_id in accepted]
        started = time.monotonic()
        with recording(ctx) as recorded:
            logprobs = ctx.reference.logprobs([(e.prompt_ids, e.response_ids) for e in rows])
            provenance = {"seconds": time.monotonic() - started, "episodes": len(rows), **recorded()}
        files = {REFERENCE_FILE: reference_bytes(rows, logprobs)}
        ctx.shards.keep(ctx.store.publish(prefix, files, request=request, provenance=provenance))
    manifest = ctx.shards.open_published(prefix, request=request).manifest
    return replace(episodes, prefix=prefix, content=manifest.content)


def seconds_of(ctx: RunContext, prefixes: list[str]) -> float:
    """Working seconds that the manifests of ``prefixes`` report, added up."""
    manifests: list[Manifest] = [ctx.shards.open_published(prefix).manifest for prefix in prefixes]
    return sum((m.provenance or {}).get("seconds", 0.0) for m in manifests)
