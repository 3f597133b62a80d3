"""``forge try``: roll out and grade a few prompts, without training. Most reports of a flat reward end here."""

from __future__ import annotations

import argparse
import json
import math
import sys
import uuid
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from flows.commands.common import loaded_config, log_to_stderr
from forge_core.config import RunConfig, load_config
from forge_core.rewards.actor import Graded
from forge_core.runs.checks import check_run

if TYPE_CHECKING:
    from forge_core.data_model import Episode  # imports torch


SAMPLES = 2  # of each prompt: several prompts, and a group to compare


def try_prompts(args: argparse.Namespace) -> int:
    """Print prompt, completion, reward by component and token counts of ``-n`` completions; fails when none could be
    graded."""
    config = loaded_config(args)
    for warning in check_run(config):
        print(f"warning: {warning}", file=sys.stderr)
    console = Console(soft_wrap=True)
    log_to_stderr()
    results = sample_and_grade(config, args.n)
    for episode, graded in results:
        _show(console, episode, graded)
    _summarise(console, results)
    return 1 if _refused(config, [graded for _, graded in results]) else 0


def sample_and_grade(config: RunConfig, n: int) -> list[tuple[Episode, Graded]]:
    """``n`` completions of the first batch's prompts with version 0, ``SAMPLES`` of each, graded. Nothing is kept."""
    from forge_core.runs.context import RunContext
    from forge_core.runs.episodes import read_episodes
    from forge_core.runs.initialise import initialise
    from forge_core.runs.record import create_run
    from forge_core.runs.stages import grade, sample_shard
    from forge_core.store import open_store

    episodes = math.ceil(n / SAMPLES) * SAMPLES
    small = load_config(
        config,
        {
            "run.id": "try",
            "grpo.n_samples": SAMPLES,
            "training.batch_size": episodes,
            "training.gradient_accumulation_steps": 1,
            "training.sync_interval": 1,
            "rollout.shards": 1,
        },
    )
    store = open_store(f"memory://try-{uuid.uuid4().hex}")
    context = RunContext(store, create_run(store, small))
    try:
        initialise(context)
        shard = sample_shard(context, 0, 0)
        rows = read_episodes(store, shard.prefix)[:n]
        return list(zip(rows, grade(context, rows), strict=True))
    finally:
        context.close()


def _show(console: Console, episode: Episode, graded: Graded) -> None:
    reward = f"{graded.reward:.3f}" if graded.reward is not None else f"none ({graded.status}: {graded.error})"
    console.rule(
        Text(f"{episode.group_id.rsplit('/', 1)[-1].lstrip('0') or '0'}.{episode.sample_index}  reward {reward}")
    )
    prompt = episode.messages[-1]["content"] if episode.messages else ""
    for label, value in (
        ("prompt", prompt),
        ("completion", episode.text),
        ("answer", str(episode.target)),
        ("components", json.dumps(graded.components)),
        ("tokens", f"{len(episode.prompt_ids)} prompt, {len(episode.response_ids)} response ({episode.finish_reason})"),
    ):
        console.print(Text(f"{label:>11}: ", style="bold"), Text(value), sep="")


def _summarise(console: Console, results: list[tuple[Episode, Graded]]) -> None:
    rewards = [g.reward for _, g in results if g.reward is not None]
    console.rule()
    truncated = sum(e.finish_reason == "length" for e, _ in results)
    mean = f"{sum(rewards) / len(rewards):.3f}" if rewards else "none"
    console.print(
        f"mean reward {mean} over {len(rewards)} graded of {len(results)}; {truncated} truncated at "
        f"rollout.max_new_tokens; {len(set(rewards))} distinct rewards"
    )
    if len(set(rewards)) == 1:
        console.print("every reward is the same: a group without differences teaches nothing")


def _refused(config: RunConfig, graded: list[Graded]) -> bool:
    """Say so when too many grades failed for a run; whether all of them did."""
    failed = [g for g in graded if g.reward is None]
    if not failed:
        return False
    limit, everything = config.rewards.max_error_share, len(failed) == len(graded)
    too_many = len(failed) / len(graded) > limit
    if too_many or everything:
        which = "every grade" if everything else f"{len(failed)} of {len(graded)} grades"
        end = f"refuse such a batch (rewards.max_error_share={limit:g})" if too_many else "have nothing to learn from"
        print(f"{which} failed: training would {end}; the first error: {failed[0].error}", file=sys.stderr)
    return everything
