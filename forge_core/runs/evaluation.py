"""Evaluation of one version on held-out prompts.

Invariants: pinned to one version; the same prompts, seeds and sampling for every version of a run, so that two
versions are compared pair by pair; stored with the digest of the weights, so the same evaluation is never repeated.
The step that records it waits for it only before it commits (``evaluation_schedule``), so that training goes on, and
the engine does not move past the version meanwhile.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from forge_core.data_model import GenerationRequest
from forge_core.evaluation.results import Evaluation, Summary, summarise
from forge_core.evaluation.suite import answered_rows, identity, place_of, suite_requests
from forge_core.observability.metrics import collecting
from forge_core.runs.episodes import (
    EPISODES_FILE,
    REWARDS_FILE,
    add_rewards,
    episode_of,
    episodes_bytes,
    read_episodes,
    rewards_bytes,
)
from forge_core.runs.responding import environment_identity, respond
from forge_core.runs.stages import grade, refuse_outage, reward_identity
from forge_core.store import layout

if TYPE_CHECKING:
    from forge_core.runs.context import RunContext


def evaluation_requests(ctx: RunContext, version: int) -> list[GenerationRequest]:
    """What an evaluation asks for; ids are ``<run_id>/eval-<version>/<prompt>/<sample>``."""
    encode = lambda prompt: ctx.heldout_ids[prompt.row]
    return suite_requests(ctx.config, ctx.heldout, encode, f"{ctx.run_id}/eval-{version:08d}", version)


def evaluate(ctx: RunContext, version: int) -> str:
    """Sample and grade the held-out prompts with ``version``, unless that was done; returns the prefix of the stored
    evaluation. A second caller waits for the first. Raises RewardError when too many grades failed."""
    with ctx.evaluating:
        return _evaluate(ctx, version)


@collecting()  # what grading records here belongs to no training step
def _evaluate(ctx: RunContext, version: int) -> str:
    weights = ctx.weights_content(version)
    prefix = layout.evaluation(ctx.run_id, version, weights)
    requests = evaluation_requests(ctx, version)
    request = identity(
        ctx.policy_digest(version),
        requests,
        ctx.heldout,
        reward_identity(ctx.config),
        environment_identity(ctx.config.environment),
    )
    if ctx.store.published(prefix):
        return ctx.store.open_published(prefix, request=request).manifest.prefix
    rows, seconds = _sample(ctx, version, requests)
    episodes = [episode_of(row) for row in rows]
    graded = grade(ctx, episodes)
    refuse_outage(ctx.config, prefix, graded)
    files = {EPISODES_FILE: episodes_bytes(rows), REWARDS_FILE: rewards_bytes(episodes, graded)}
    tokens = sum(len(e.response_ids) for e in episodes)
    provenance = {"seconds": seconds, "tokens": tokens, "policy_version": version, "asked": len(requests)}
    return ctx.store.publish(prefix, files, request=request, provenance=provenance).prefix


def _sample(ctx: RunContext, version: int, requests: list[GenerationRequest]) -> tuple[list[dict], float]:
    """The rows of the answered requests, and the seconds that the engine worked."""
    if ctx.config.rollout.version == "oldest":
        ctx.rollouts.wait_before(min(version + ctx.config.max_staleness, ctx.config.steps), ctx.stop)
    with ctx.sampling(version) as engine:
        started = time.monotonic()
        prompts = {r.request_id: ctx.heldout[place_of(r.request_id)[0]] for r in requests}
        completions = respond(ctx.config, ctx.play, engine, requests, prompts, ctx.stop)
        seconds = time.monotonic() - started
    wrong = {c.metadata["policy_version"] for c in completions} - {version}
    if wrong:
        raise RuntimeError(f"the evaluation of version {version} was sampled by versions {sorted(wrong)}")
    return answered_rows(requests, ctx.heldout, completions), seconds


def evaluation_metrics(ctx: RunContext, version: int) -> dict[str, float]:
    """Metrics of the stored evaluation of ``version``; those of rewards only where a sample was graded."""
    prefix = layout.evaluation(ctx.run_id, version, ctx.weights_content(version))
    episodes = read_episodes(ctx.store, prefix)
    add_rewards(ctx.store, prefix, episodes)
    asked = ctx.store.open_published(prefix).manifest.provenance.get("asked", len(episodes))
    counts = {
        "eval/version": version,
        "eval/prompts": len({e.group_id for e in episodes}),
        "eval/missing": asked - len(episodes),
        "eval/failed_grades": sum(e.reward is None for e in episodes),
    }
    graded = any(e.reward is not None for e in episodes)
    return {**counts, **(reward_metrics(summarise(Evaluation(prefix, episodes, {}))) if graded else {})}


def reward_metrics(summary: Summary) -> dict[str, float]:
    """An evaluation's figures as metrics of a training step."""
    reward = summary.reward
    return {
        "eval/reward/mean": reward.mean,
        "eval/reward/low": reward.low,
        "eval/reward/high": reward.high,
        **{f"eval/pass@{k}": share for k, share in summary.passes.items()},
        "eval/response/mean_tokens": summary.mean_tokens,
        "eval/response/truncated_share": summary.truncated,
        **{f"eval/task/{task}/reward/mean": inner.reward.mean for task, inner in summary.tasks.items()},
    }
