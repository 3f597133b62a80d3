"""Plans: what a batch is made of, decided before anything is generated.

Invariants:
- A plan is a pure function of configuration, seed, data and the cursor of the plan before it (with
  ``filters.adaptive`` also of the newest ledger entry that every batch of its age waits for), and it is stored before
  anybody acts on it: after a crash open plans are reused, never drawn again.
- Groups are whole: all samples of a prompt lie in one shard.
- A prompt that is too long is skipped with its reason and its number of tokens; the batch is filled with the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forge_core.algorithms.fates import PROMPT_TOO_LONG, SURPLUS, TRUNCATED, ZERO_VARIANCE, PlannedGroup
from forge_core.config import ConfigError, RunConfig
from forge_core.data.curriculum import Curriculum
from forge_core.data.cursor import Cursor, next_rows
from forge_core.data.prompts import PromptSet
from forge_core.data_model import GenerationRequest, SamplingParams
from forge_core.devices import engine_count
from forge_core.generation.seeds import sample_seed

REFILL_EPOCHS = 10**6  # data-order epochs from here on belong to refill rounds


def sampling_of(config: RunConfig) -> SamplingParams:
    """How training responses are sampled."""
    r = config.rollout
    return SamplingParams(config.grpo.temperature, r.top_p, r.top_k, r.min_p, r.max_new_tokens)


SHARDS_PER_ENGINE = 4


def shard_count(config: RunConfig) -> int:
    """Shards per batch: as configured; else one per generator role (the embedded backend runs rollouts one at a time),
    or four per vLLM engine, so that grading begins while others are sampled."""
    return config.rollout.shards or min(shards_at_once(config) * config.roles.generators, config.groups_per_batch)


def shards_at_once(config: RunConfig) -> int:
    """Shards that one process samples at a time: one (the embedded backend), or what keeps its vLLM engines busy."""
    return 1 if config.generator.backend == "hf" else SHARDS_PER_ENGINE * engine_count(config)


def signal_share(entry: dict[str, Any] | None) -> float:
    """The share of a committed batch's episodes that were in groups with signal; 1 where no batch tells."""
    if entry is None:
        return 1.0
    trained, dropped = entry["episodes"]["trained"], entry["episodes"]["dropped"]
    found = trained + sum(dropped.get(reason, 0) for reason in (SURPLUS, TRUNCATED))
    return found / max(found + dropped.get(ZERO_VARIANCE, 0), 1)


@dataclass(frozen=True)
class Planner:
    """What plans are made from. ``encode(row)`` gives a prompt's token ids; ``rows`` are those to train on.
    ``curriculum``: the order of the first epochs, and how far refills may go."""

    config: RunConfig
    prompts: PromptSet
    rows: list[int]
    encode: Callable[[int], list[int]]
    curriculum: Curriculum | None = None

    def plan(self, batch: int, cursor: Cursor, signal: float = 0.0) -> dict[str, Any]:
        """Round 0 of ``batch`` as a JSON object; it starts at the cursor that the batch before ended at. ``signal``:
        see ``RunConfig.groups_sampled``."""
        groups = self.config.groups_sampled(self.config.groups_per_batch, signal)
        return self._plan(batch, 0, 0, groups, cursor, self.rows)

    def refill(
        self, batch: int, round: int, first_group: int, wanted: int, begun: Cursor, signal: float = 0.0
    ) -> dict[str, Any]:
        """An extra round for a batch that lacks ``wanted`` groups. It draws from a stream of its own, so that the next
        batch does not depend on how this one went. ``begun``: where the batch began, whose level it does not exceed."""
        stream = Cursor(REFILL_EPOCHS + batch * (self.config.filters.max_rounds + 1) + round, 0)
        rows = self.curriculum.reached(begun) if self.curriculum else self.rows
        return self._plan(batch, round, first_group, self.config.groups_sampled(wanted, signal), stream, rows)

    def _plan(
        self, batch: int, round: int, first_group: int, wanted: int, cursor: Cursor, rows: list[int]
    ) -> dict[str, Any]:
        groups, after = self._draw(batch, round, first_group, wanted, cursor, rows)
        alive = [g["group"] for g in groups if g["skipped"] is None]
        return {
            "batch": batch,
            "round": round,
            "groups": groups,
            "shards": _split(alive, min(shard_count(self.config), len(alive))),
            "sampling": sampling_of(self.config).__dict__,
            "cursor": {"before": cursor.__dict__, "after": after.__dict__},
        }

    def _draw(
        self, batch: int, round: int, first_group: int, wanted: int, cursor: Cursor, rows: list[int]
    ) -> tuple[list[dict[str, Any]], Cursor]:
        groups: list[dict[str, Any]] = []
        skipped_in_a_row, after = 0, cursor
        shuffle = round > 0 or self.config.dataset is None or self.config.dataset.shuffle
        for row, position in next_rows(cursor, rows, self.config.run.seed, shuffle, self.curriculum):
            group, after = self._group(batch, round, first_group + len(groups), row), position
            groups.append(group)
            wanted -= group["skipped"] is None
            skipped_in_a_row = skipped_in_a_row + 1 if group["skipped"] else 0
            if wanted == 0:
                break
            if skipped_in_a_row > len(rows):
                raise ConfigError(
                    f"rollout.max_prompt_tokens: every prompt of dataset.path is longer than "
                    f"{self.config.max_prompt_tokens} tokens: raise rollout.max_prompt_tokens or training.seq_len"
                )
        return groups, after

    def _group(self, batch: int, round: int, index: int, row: int) -> dict[str, Any]:
        prompt_ids = self.encode(row)
        too_long = len(prompt_ids) > self.config.max_prompt_tokens
        samples = range(self.config.grpo.n_samples)
        return {
            "group": index,
            "row": row,
            "prompt_id": self.prompts[row].prompt_id,
            "prompt_tokens": len(prompt_ids),
            "skipped": PROMPT_TOO_LONG if too_long else None,
            "prompt_ids": [] if too_long else prompt_ids,
            "seeds": [sample_seed(self.config.run.seed, batch, round, index, s) for s in samples],
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


def shard_groups(plan: dict[str, Any], shard: int) -> list[dict[str, Any]]:
    """The groups of one shard, in plan order."""
    members = set(plan["shards"][shard])
    return [g for g in plan["groups"] if g["group"] in members]


def shard_requests(run_id: str, plan: dict[str, Any], shard: int, min_version: int = 0) -> list[GenerationRequest]:
    """The generation requests of one shard, group by group in plan order; ``min_version`` may sample them at least."""
    sampling, batch = SamplingParams(**plan["sampling"]), plan["batch"]
    return [
        GenerationRequest(
            episode_id(run_id, batch, g["group"], s), tuple(g["prompt_ids"]), seed, sampling, batch, min_version
        )
        for g in shard_groups(plan, shard)
        for s, seed in enumerate(g["seeds"])
    ]
