"""How episodes are sampled, played and evaluated."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from forge_core.config.section import Fraction, Positive, Section


class RolloutSection(Section):
    version: Literal["newest", "oldest"] = Field(
        "newest",
        description="newest: sample with the newest committed version; oldest: batch b exactly with version "
        "max(0, b - max_staleness), which makes a CPU run reproducible bit for bit.",
    )
    max_new_tokens: Positive = Field(
        128,
        description="Tokens per response, at most; with an environment those of all turns and of what it answers.",
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="Longer prompts are dropped, with the reason. Left out: seq_len - max_new_tokens."
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; below 1 needs allow_truncated_sampling.")
    top_k: int = Field(0, ge=0, description="Sample among the k likeliest tokens; 0: all.")
    min_p: Fraction = Field(0.0, description="Drop tokens below this share of the likeliest token's probability.")
    allow_truncated_sampling: bool = Field(False, description="Accept the biased ratio that truncation brings.")
    shards: int | None = Field(
        None, ge=1, description="Rollout tasks per batch. Left out: one per generator role, or four per vLLM engine."
    )
    deadline_s: float = Field(3600.0, gt=0, description="Seconds after which unfinished episodes are dropped.")


class EnvironmentSection(Section):
    """Episodes of several turns: what answers the policy."""

    path: str = Field(description="<module>:<name>, <file.py>:<name>, or the name of a built-in environment.")
    options: dict[str, Any] = Field({}, description="Arguments of the environment class.")
    max_turns: Positive = Field(8, description="Turns of the policy in an episode, at most.")
    max_turn_tokens: int | None = Field(
        None, ge=1, description="Sampled tokens of a turn, at most. Left out: what rollout.max_new_tokens leaves."
    )
    turn_timeout_s: float = Field(
        60.0, gt=0, description="Seconds that the environment has for an answer; then the episode is dropped."
    )
    workers: Positive = Field(16, description="Environments of a rollout shard that work at a time, in threads.")
    max_open: Positive | None = Field(
        None,
        description="Environments of a rollout shard that are open at a time, such as sessions of a server: a vLLM "
        "engine samples up to four shards at a time. Left out: one for each episode.",
    )
    max_broken_share: Fraction = Field(
        0.5, description="A shard with a larger share of broken environments is an error: an outage is no data."
    )
    tool_format: Literal["auto", "hermes", "qwen_coder", "llama", "mistral", "text"] = Field(
        "auto", description="How the model writes tool calls; auto: as its chat template teaches it."
    )
    tool_pattern: str | None = Field(
        None, description="tool_format=text: a regular expression; its named groups are the arguments of the call."
    )


class EvalSection(Section):
    interval: int = Field(0, ge=0, description="Training steps between evaluations; 0: only before and after.")
    prompts: int = Field(256, ge=0, description="Held-out prompts per evaluation; 0: no evaluation.")
    holdout: float = Field(0.1, ge=0, lt=1, description="Share of prompts held out, chosen by a hash of the prompt.")
    split: str | None = Field(None, description="Evaluate on this split instead of held-out training prompts.")
    temperature: float = Field(1.0, ge=0, le=10, description="Sampling temperature of the evaluation; 0: greedy.")
    samples: Positive = Field(1, description="Responses sampled per held-out prompt.")
