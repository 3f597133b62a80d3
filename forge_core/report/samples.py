"""What a run sampled: the best, the median and the worst answer of its beginning, middle and end.

Invariant: only shards whose episodes and rewards are both whole are shown; what is damaged is named as a problem.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forge_core.data_model import EPISODES, REWARDS, from_parquet
from forge_core.report.facts import Facts
from forge_core.runs.episodes import EPISODES_FILE, REWARDS_FILE
from forge_core.store import layout

PHASES = ("beginning", "middle", "end")
SHARDS = 8  # of a batch that are read


@dataclass(frozen=True)
class Sample:
    """One answer. ``place``: best, median or worst of its batch by reward; ``components``: of its reward."""

    place: str
    episode_id: str
    prompt: str
    text: str
    target: str | None
    reward: float
    components: dict[str, float]
    tokens: int
    finish_reason: str
    policy_version: int


@dataclass(frozen=True)
class Phase:
    """``name`` of the phase, its ``batch``, and its samples, the best first."""

    name: str
    batch: int
    samples: list[Sample]


def phases(facts: Facts) -> list[Phase]:
    """Of a run with fewer than three graded batches there are fewer phases."""
    episodes, rewards = facts.published("episodes"), facts.published("rewards")
    batches = sorted(episodes.keys() & rewards.keys())
    places = {0: batches[:1], 1: batches[len(batches) // 2 :][:1], 2: batches[-1:]}
    chosen = {batch: PHASES[i] for i, found in places.items() for batch in found}
    if len(batches) == 1:
        chosen = {batches[0]: PHASES[0]}
    made = [Phase(name, batch, _samples(facts, rewards[batch][:SHARDS])) for batch, name in chosen.items()]
    return sorted((phase for phase in made if phase.samples), key=lambda phase: phase.batch)


def _samples(facts: Facts, prefixes: Sequence[str]) -> list[Sample]:
    shards = facts.all_of(prefixes, lambda prefix: _shard(facts, prefix))
    graded = [row for rows in shards for row in rows or []]
    graded.sort(key=lambda row: (-row["reward"], row["episode_id"]))
    places = {"best": 0, "median": len(graded) // 2, "worst": len(graded) - 1}
    return [_sample(place, graded[i]) for place, i in places.items() if graded]


def _shard(facts: Facts, prefix: str) -> list[dict[str, Any]]:
    """Rows of the graded episodes of a shard of rewards, with their rewards."""
    root, where = layout.run(facts.run_id), prefix.partition("/rewards/")[2]
    sampled = f"{root}episodes/{where}"
    open_ = facts.store.open_published
    rewards = from_parquet(open_(prefix).read(REWARDS_FILE), REWARDS, prefix)
    rows = from_parquet(open_(sampled).read(EPISODES_FILE), EPISODES, sampled)
    known = {row["episode_id"]: row for row in rewards if row["reward"] is not None}
    return [{**row, **known[row["episode_id"]]} for row in rows if row["episode_id"] in known]


def _sample(place: str, row: dict[str, Any]) -> Sample:
    return Sample(
        place, row["episode_id"], _prompt(row["messages"]), row["text"], row["target"], row["reward"],
        dict(row["components"] or []), len(row["response_mask"]), row["finish_reason"], row["policy_version"],
    )  # fmt: skip


def _prompt(messages: str) -> str:
    """The messages as text: only the content where there is one."""
    found = json.loads(messages)
    if len(found) == 1:
        return str(found[0].get("content", ""))
    return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in found)
