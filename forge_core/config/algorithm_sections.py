"""GRPO itself: groups, advantages, filters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from forge_core.config.section import Positive, Section

Estimator = Literal["group", "leave_one_out", "max_rl", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


class GRPOSection(Section):
    n_samples: Positive = Field(8, description="Responses sampled per prompt (the group size).")
    clip_low: float = Field(0.2, ge=0, description="Ratio is clipped at 1 - clip_low.")
    clip_high: float = Field(0.28, ge=0, description="Ratio is clipped at 1 + clip_high.")
    beta: float = Field(0.1, ge=0, description="Weight of the KL penalty to the reference model; 0: no reference.")
    temperature: float = Field(1.0, ge=0, le=10, description="Sampling temperature.")


class AdvantageSection(Section):
    estimator: Estimator = Field(
        "group",
        description="group: reward minus the group's mean; leave_one_out: minus the mean of the others (RLOO); "
        "max_rl: minus the mean and divided by it (MaxRL, rewards from 0 up); reinforce_plus_plus: the reward, "
        "whitened over the tokens of the batch; reinforce_plus_plus_baseline: minus the group's mean first.",
    )
    normalize: bool = Field(True, description="group: divide by the standard deviation (false: Dr. GRPO).")
    eps: float = Field(1e-4, ge=0, description="group: added to the standard deviation.")


class FilterSection(Section):
    dynamic_sampling: bool = Field(
        False, description="Drop groups whose rewards are all equal and refill the batch with other prompts (DAPO)."
    )
    max_rounds: int = Field(
        3, ge=0, description="Extra rounds of rollouts to refill one batch, at most; 0: train with what the first gave."
    )
    oversample: float = Field(
        1.0,
        ge=1,
        le=64,
        description="Prompts sampled in every round, as a multiple of the groups that the batch still lacks: one large "
        "round is faster than several small ones. Above 1 needs dynamic_sampling.",
    )
    adaptive: bool = Field(
        False,
        description="Sample only as many prompts as fill the batch if as many of their groups have unequal rewards as "
        "in the newest batch that is always trained on before this one is sampled; oversample is the most. The first "
        "batches are sampled as if all had.",
    )
    truncated: Literal["keep", "mask", "zero_advantage"] = Field(
        "keep",
        description="Episodes cut at max_new_tokens: keep: train as they are; mask: drop from the loss and its "
        "denominators; zero_advantage: count their tokens, with advantage 0.",
    )
