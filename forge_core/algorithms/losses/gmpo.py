"""GMPO: Geometric-Mean Policy Optimization.

    L = agg( -A_i exp(mean_t c_t) ),   c_t = the log-ratio l - a, clipped to [-clip_low, clip_high] as PPO clips:
    only where that makes the objective smaller, by the sign of the token's advantage

The objective is the geometric mean of the tokens' clipped ratios, which one outlier moves less than their arithmetic
mean. The clip is on the log-ratio. A_i is the mean advantage of the sequence (its one advantage, in a run).

Source: arXiv 2507.20673 (clip 0.4 and 0.4: exp(-0.4) to exp(0.4)). Differences: none known to verl's ``geo_mean``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_core.algorithms.corrections import Correction
from forge_core.algorithms.losses.base import PolicyLoss, Tokens
from forge_core.algorithms.ops import MAX_LOG_RATIO, AggregationType, KLType, sequence_mean


class GMPOLoss(PolicyLoss):
    """``clip_low``, ``clip_high``: bounds of the log-ratio. The rest: see PolicyLoss."""

    def __init__(
        self,
        clip_low: float = 0.4,
        clip_high: float = 0.4,
        beta: float = 0.0,
        agg_type: AggregationType = "sequence_mean",
        entropy_coef: float = 0.0,
        *,
        kl_type: KLType = "k3",
        correction: Correction | None = None,
    ) -> None:
        super().__init__(beta, agg_type, entropy_coef, kl_type=kl_type, correction=correction)
        self.clip_low, self.clip_high = clip_low, clip_high

    def policy_gradient(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        mask_BT, ids_BT = tokens.mask, tokens.document_ids
        sign_BT = tokens.advantages.sign()
        log_ratio_BT = tokens.logprobs - tokens.anchor
        bounded_BT = log_ratio_BT.clamp(-self.clip_low, self.clip_high)
        clipped_BT = sign_BT * bounded_BT < sign_BT * log_ratio_BT
        least_BT = sign_BT.square() * torch.where(clipped_BT, bounded_BT, log_ratio_BT)
        ratio_BT = sequence_mean(least_BT, mask_BT, ids_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        loss_BT = -sequence_mean(tokens.advantages, mask_BT, ids_BT) * ratio_BT
        return loss_BT, {"ratio/mean": ratio_BT, "clip/fraction": clipped_BT}
