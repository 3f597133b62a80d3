"""Policy losses, one a file. ``build_loss`` makes the one that a configuration names."""

from forge_core.algorithms.losses.grpo import GRPOLoss
from forge_core.config.run_config import RunConfig


def build_loss(config: RunConfig) -> GRPOLoss:
    """The policy loss of ``config``."""
    grpo = config.grpo
    return GRPOLoss(grpo.clip_low, grpo.clip_high, grpo.beta, config.loss.agg_type, config.training.entropy_coef)


__all__ = ["GRPOLoss", "build_loss"]
