"""Episodes, rewards and reference log-probabilities as rows of the store's tables, and back.

Invariants: one Parquet file a shard; rows keep the plan's order; what was sampled is stored as it was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from forge_core.data.prompts import Prompt
from forge_core.data_model import (
    EPISODES,
    REFERENCE,
    REWARDS,
    Completion,
    Episode,
    GenerationRequest,
    VersionSpan,
    from_parquet,
    to_parquet,
)
from forge_core.rewards.actor import Graded
from forge_core.store import Opener

EPISODES_FILE = "episodes.parquet"
REWARDS_FILE = "rewards.parquet"
REFERENCE_FILE = "reference.parquet"
TRAINING_FILE = "training.parquet"


def episode_row(request: GenerationRequest, prompt: Prompt, completion: Completion) -> dict[str, Any]:
    """The ``episodes`` row of one finished completion."""
    group_id, _, sample = request.request_id.rpartition("/")
    meta = completion.metadata
    played = {"environment": meta["environment"]} if "environment" in meta else {}
    return {
        "episode_id": request.request_id,
        "group_id": group_id,
        "sample_index": int(sample),
        "prompt_id": prompt.prompt_id,
        "messages": json.dumps(prompt.messages, ensure_ascii=False),
        "prompt_ids": list(request.prompt_ids),
        "response_ids": completion.token_ids,
        "response_mask": meta.get("response_mask", [True] * len(completion.token_ids)),
        "response_logprobs": completion.logprobs,
        "text": completion.text,
        "finish_reason": meta["finish_reason"],
        "policy_version": meta["policy_version"],
        "version_spans": [span.__dict__ for span in meta["version_spans"]],
        "target": prompt.target,
        "task": prompt.task,
        "metadata": json.dumps({**prompt.metadata, **played}, ensure_ascii=False, sort_keys=True),
        "sampling": json.dumps({**request.sampling.__dict__, "seed": request.seed}, sort_keys=True),
        "created_at": datetime.now(UTC),
    }


def episodes_bytes(rows: list[dict[str, Any]]) -> bytes:
    return to_parquet(rows, EPISODES)


def rewards_bytes(episodes: Sequence[Episode], graded: Sequence[Graded]) -> bytes:
    rows = [
        {
            "episode_id": e.episode_id,
            "reward": g.reward,
            "components": list(g.components.items()),
            "status": g.status,
            "error": g.error,
        }
        for e, g in zip(episodes, graded, strict=True)
    ]
    return to_parquet(rows, REWARDS)


def reference_bytes(episodes: Sequence[Episode], logprobs: Sequence[list[float]]) -> bytes:
    rows = [{"episode_id": e.episode_id, "ref_logprobs": x} for e, x in zip(episodes, logprobs, strict=True)]
    return to_parquet(rows, REFERENCE)


def read_episodes(store: Opener, prefix: str) -> list[Episode]:
    """The episodes of one shard, without rewards."""
    data = store.open_published(prefix).read(EPISODES_FILE)
    return [episode_of(row) for row in from_parquet(data, EPISODES, f"{prefix}{EPISODES_FILE}")]


def episode_of(row: dict[str, Any]) -> Episode:
    """An ``episodes`` row in memory, with its JSON columns decoded."""
    decoded = {name: json.loads(row[name]) for name in ("messages", "metadata", "sampling")}
    spans = [VersionSpan(**span) for span in row["version_spans"]]
    return Episode(**{**row, **decoded, "version_spans": spans, "created_at": row["created_at"].isoformat()})


def add_rewards(store: Opener, prefix: str, episodes: Sequence[Episode]) -> None:
    """Fill in the rewards that ``prefix`` holds; every episode must have its row."""
    data = store.open_published(prefix).read(REWARDS_FILE)
    rows = {row["episode_id"]: row for row in from_parquet(data, REWARDS, f"{prefix}{REWARDS_FILE}")}
    for episode in episodes:
        row = rows[episode.episode_id]
        episode.reward, episode.components = row["reward"], dict(row["components"])
        episode.reward_status, episode.reward_error = row["status"], row["error"]


def read_reference(store: Opener, prefix: str) -> dict[str, list[float]]:
    """Reference log-probabilities of one shard by episode id."""
    data = store.open_published(prefix).read(REFERENCE_FILE)
    rows = from_parquet(data, REFERENCE, f"{prefix}{REFERENCE_FILE}")
    return {row["episode_id"]: row["ref_logprobs"] for row in rows}
