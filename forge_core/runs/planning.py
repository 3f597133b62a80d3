"""Plans: what a batch is made of, decided before anything is generated.

Invariants:
- A plan is a pure function of configuration, seed, data and the cursor of the plan before it, and it is stored before
  anybody acts on it: after a crash open plans are reused, never drawn again.
- Groups are whole: all samples of a prompt lie in one shard.
- A prompt that is too long is skipped with its reason and its number of tokens; the batch is filled with the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from forge_core.algorithms.fates import PROMPT_TOO_LONG, PlannedGroup
from forge_core.config import ConfigError, RunConfig
from forge_core.data.cursor import Cursor, next_rows
from forge_core.data.prompts import PromptSet
from forge_core.data_model import GenerationRequest, SamplingParams
from forge_core.generation.seeds import sample_seed


def sampling_of(config: RunConfig) -> SamplingParams:
    """How training responses are sampled."""
    r = config.rollout
    return SamplingParams(config.grpo.temperature, r.top_p, r.top_k, r.min_p, r.max_new_tokens)


def shard_count(config: RunConfig) -> int:
    """Shards per batch: as configured, else one (the embedded backend runs rollouts one at a time)."""
    return config.rollout.shards or 1


def make_plan(
    batch: int,
    cursor: Cursor,
    prompts: PromptSet,
    rows: list[int],
    config: RunConfig,
    encode: Callable[[int], list[int]],
) -> dict[str, Any]:
    """The plan of ``batch`` as a JSON object; ``encode(row)`` gives a prompt's token ids."""
    groups: list[dict[str, Any]] = []
    wanted, skipped, after = config.groups_per_batch, 0, cursor
    for row, position in next_rows(cursor, rows, config.run.seed, config.dataset is None or config.dataset.shuffle):
        after = position
        group = _group(len(groups), row, prompts[row].prompt_id, encode(row), batch, config)
        groups.append(group)
        wanted -= group["skipped"] is None
        skipped = skipped + 1 if group["skipped"] else 0
        if wanted == 0:
            break
        if skipped > len(rows):
            raise ConfigError(
                f"rollout.max_prompt_tokens: every prompt of dataset.path is longer than {config.max_prompt_tokens} "
                "tokens: raise rollout.max_prompt_tokens or training.seq_len"
            )
    alive = [g["group"] for g in groups if g["skipped"] is None]
    return {
        "batch": batch,
        "round": 0,
        "groups": groups,
        "shards": _split(alive, shard_count(config)),
        "sampling": sampling_of(config).__dict__,
        "cursor": {"before": cursor.__dict__, "after": after.__dict__},
    }


def _group(
    index: int, row: int, prompt_id: str, prompt_ids: list[int], batch: int, config: RunConfig
) -> dict[str, Any]:
    too_long = len(prompt_ids) > config.max_prompt_tokens
    samples = range(config.grpo.n_samples)
    return {
        "group": index,
        "row": row,
        "prompt_id": prompt_id,
        "prompt_tokens": len(prompt_ids),
        "skipped": PROMPT_TOO_LONG if too_long else None,
        "prompt_ids": [] if too_long else prompt_ids,
        "seeds": [sample_seed(config.run.seed, batch, 0, index, s) for s in samples],
    }


def _split(items: list[int], parts: int) -> list[list[int]]:
    """``items`` in order, in ``parts`` runs whose lengths differ by at most one."""
    bounds = [len(items) * i // parts for i in range(parts + 1)]
    return [items[a:b] for a, b in itertools.pairwise(bounds)]


def episode_id(run_id: str, batch: int, group: int, sample: int) -> str:
    return f"{run_id}/{batch:08d}/{group:08d}/{sample:08d}"


def planned_groups(run_id: str, plan: dict[str, Any]) -> list[PlannedGroup]:
    """The plan's groups as episode ids, in plan order."""
    return [
        PlannedGroup(
            tuple(episode_id(run_id, plan["batch"], g["group"], s) for s in range(len(g["seeds"]))), g["skipped"]
        )
        for g in plan["groups"]
    ]


def shard_requests(run_id: str, plan: dict[str, Any], shard: int) -> list[GenerationRequest]:
    """The generation requests of one shard, group by group in plan order."""
    sampling = SamplingParams(**plan["sampling"])
    groups = [plan["groups"][g] for g in plan["shards"][shard]]
    return [
        GenerationRequest(
            episode_id(run_id, plan["batch"], g["group"], s), tuple(g["prompt_ids"]), seed, sampling, plan["batch"]
        )
        for g in groups
        for s, seed in enumerate(g["seeds"])
    ]
