"""GRPO: the clipped policy gradient of PPO with group-relative advantages and a KL penalty.

    L = agg( max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) + beta k3 - entropy_coef H ),   r = exp(l - a)

Sources: GRPO (arXiv 2402.03300), clip of PPO (arXiv 1707.06347), asymmetric clip from DAPO (arXiv 2503.14476), fixed
horizon from Dr. GRPO (arXiv 2503.20783): Dr. GRPO is ``agg_type="fixed_horizon"`` with advantages that are not divided
by the group's standard deviation.
Differences: the paper averages per sequence (``sequence_mean``); torchforge's SimpleGRPOLoss has ratio 1 and no clip;
verl always adds a dual clip (see DAPOLoss); TRL and AReaL do not clamp the log-ratio.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_core.algorithms.corrections import Correction
from forge_core.algorithms.losses.base import PolicyLoss, Tokens
from forge_core.algorithms.ops import AggregationType, KLType, compute_ratio


def clipped_policy_gradient(
    ratio_BT: Tensor, advantages_BT: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """``max(-r A, -clip(r) A)`` and whether the clip decided."""
    bounded_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    unclipped_BT, clipped_BT = -ratio_BT * advantages_BT, -bounded_BT * advantages_BT
    return torch.maximum(unclipped_BT, clipped_BT), clipped_BT > unclipped_BT


class GRPOLoss(PolicyLoss):
    """``clip_low``, ``clip_high``: the ratio is clipped to [1 - clip_low, 1 + clip_high]. The rest: see PolicyLoss."""

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        beta: float = 0.1,
        agg_type: AggregationType = "fixed_horizon",
        entropy_coef: float = 0.0,
        *,
        kl_type: KLType = "k3",
        correction: Correction | None = None,
    ) -> None:
        super().__init__(beta, agg_type, entropy_coef, kl_type=kl_type, correction=correction)
        self.clip_low, self.clip_high = clip_low, clip_high

    def policy_gradient(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_BT = compute_ratio(tokens.logprobs, tokens.anchor, tokens.mask)
        loss_BT, clipped_BT = clipped_policy_gradient(ratio_BT, tokens.advantages, self.clip_low, self.clip_high)
        return loss_BT, {"ratio/mean": ratio_BT, "clip/fraction": clipped_BT}
