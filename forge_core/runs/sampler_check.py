"""Whether the sampler computes what the trainer does, by the first batch of a run: the version that sampled it is the
one that is trained, so their log-probabilities differ by rounding alone.

Published versions have a probe (``models/probe.py``); the one that a run begins with has none. An engine that computes
something else would be noticed at the first swap of weights, after a window of batches, or never.

Nothing is said where the two differ by nature: truncated or altered sampling, episodes of another run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_core.config.vllm_keys import biasing
from forge_core.generation.vllm_settings import VLLMSettings
from forge_core.models.probe import TOLERANCE, coarsest

if TYPE_CHECKING:
    from forge_core.config import RunConfig
    from forge_core.runs.context import RunContext

SOMEWHERE = (("",),)  # GPUs of an engine that another process has


class SamplerMismatch(RuntimeError):
    """The sampler's log-probabilities are not those of the model that it was given."""


def check_sampler(ctx: RunContext, batch: int, gap: float | None) -> None:
    """``gap``: mean difference of sampler and trainer in the first optimizer step on ``batch``, in nats a token (None:
    nobody measured it). Raises SamplerMismatch."""
    if batch or gap is None or ctx.record.parent or _altered(ctx.config):
        return
    # Logits were divided by the temperature, and so were their rounding errors.
    allowed = TOLERANCE[_coarsest(ctx)] * max(1.0, 1.0 / ctx.config.grpo.temperature)
    if not gap <= allowed:  # nor if it is no number
        raise SamplerMismatch(
            f"training step 0: log-probabilities of sampler and trainer differ by {gap:.3g} on average (allowed: "
            f"{allowed:.3g}), though version 0 sampled what it is trained on: the engine computes something else than "
            "the model. Nothing was committed, and the episodes of this run are of no use: start a new one without "
            "what changes the engine's computation (generator.engine_args), or with generator.backend=hf"
        )


def _altered(config: RunConfig) -> bool:
    """Whether tokens are sampled from another distribution than the model's, as the stored log-probabilities say."""
    rollout = config.rollout
    return rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0 or bool(biasing(config.generator))


def _coarsest(ctx: RunContext) -> str:
    """The coarsest type that a token's log-probability went through, on either side."""
    config, generator = ctx.config, ctx.config.generator
    placed = ctx.placement.generator if ctx.role is None else SOMEWHERE
    engine = VLLMSettings(gpus=placed, dtype=generator.dtype, engine_args=generator.engine_args)
    exact = config.training.dtype != "float32" or ctx.device("trainer") == "cpu"
    trainer = "float8" if config.quantize.float8 else config.training.dtype if exact else "tensorfloat32"
    return coarsest(engine.arithmetic, trainer, config.weights_dtype)
