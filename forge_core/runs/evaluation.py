"""Evaluation of one version on held-out prompts.

Invariants: pinned to one version; the same prompts, seeds and sampling for every version of a run, so that two
versions are compared pair by pair; stored with the digest of the weights, so the same evaluation is never repeated.
"""

from __future__ import annotations

import time
from statistics import fmean

from forge_core.config import RunConfig
from forge_core.data_model import GenerationRequest
from forge_core.evaluation.suite import answered_rows, identity, place_of, suite_requests
from forge_core.runs.context import RunContext
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
from forge_core.runs.stages import grade, reward_identity
from forge_core.store import layout


def evaluation_due(config: RunConfig, batch: int) -> bool:
    """Whether version ``batch`` is evaluated before step ``batch`` trains it: the initial version, and every
    ``eval.interval``. The train task itself has the last version evaluated, just before it commits."""
    due = batch == 0 or (config.eval.interval > 0 and batch % config.eval.interval == 0)
    return due and config.eval.prompts > 0


def evaluation_requests(ctx: RunContext, version: int) -> list[GenerationRequest]:
    """What an evaluation asks for; ids are ``<run_id>/eval-<version>/<prompt>/<sample>``."""
    return suite_requests(ctx.config, ctx.heldout, ctx.encode, f"{ctx.run_id}/eval-{version:08d}", version)


def evaluate(ctx: RunContext, version: int) -> str:
    """Sample and grade the held-out prompts with ``version``; returns the prefix of the stored evaluation."""
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
    files = {EPISODES_FILE: episodes_bytes(rows), REWARDS_FILE: rewards_bytes(episodes, graded)}
    tokens = sum(len(e.response_ids) for e in episodes)
    provenance = {"seconds": seconds, "tokens": tokens, "policy_version": version}
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
    """Metrics of the stored evaluation of ``version``; empty when there is none."""
    prefix = layout.evaluation(ctx.run_id, version, ctx.weights_content(version))
    if not ctx.store.published(prefix):
        return {}
    episodes = read_episodes(ctx.store, prefix)
    add_rewards(ctx.store, prefix, episodes)
    rewards = [e.reward for e in episodes if e.reward is not None]
    return {
        "eval/version": version,
        "eval/reward/mean": fmean(rewards) if rewards else 0.0,
        "eval/prompts": len({e.group_id for e in episodes}),
        "eval/missing": len(evaluation_requests(ctx, version)) - len(episodes),
        "eval/failed_grades": len(episodes) - len(rewards),
    }
