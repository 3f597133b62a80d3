"""DPPO: a trust region on probabilities instead of ratios (binary total variation).

    L = agg( -keep r A + drift_coef (l - b)^2 ),   r = exp(l - b),   p = exp(l) - exp(b)
    keep = not (A > 0 and p > mask_high, or A <= 0 and p < -mask_low)

A token is left out when its probability already moved far enough in the direction that the advantage asks for. A ratio
says little about that: for a rare token it is large while the probability hardly moves. ``two_sided``: keep only
``-mask_low <= p <= mask_high``, whatever the advantage. ``ratio_cap``: weights ``min(r, cap)`` without gradient on l,
``-keep sg(min(r, cap)) A l``, so that a capped token keeps its gradient. ``drift_coef``: weight of a squared log-ratio
to the sampler that holds all tokens back, kept or not.

Source: arXiv 2602.04879. prime-rl's default is ``drift_coef=1e-3`` without a cap, its "ipo" adds ``two_sided``; verl's
``dppo_tv`` is ``ratio_cap=20`` without drift.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_core.algorithms.losses.base import PolicyLoss, Tokens
from forge_core.algorithms.ops import AggregationType, KLType, compute_ratio


class DPPOLoss(PolicyLoss):
    """``mask_low``, ``mask_high``: largest change of a token's probability. The rest: above and in PolicyLoss."""

    def __init__(
        self,
        mask_low: float = 0.2,
        mask_high: float = 0.2,
        beta: float = 0.0,
        agg_type: AggregationType = "token_mean",
        entropy_coef: float = 0.0,
        *,
        two_sided: bool = False,
        ratio_cap: float | None = None,
        drift_coef: float = 0.0,
        kl_type: KLType = "k3",
    ) -> None:
        super().__init__(beta, agg_type, entropy_coef, kl_type=kl_type)
        self.mask_low, self.mask_high, self.two_sided = mask_low, mask_high, two_sided
        self.ratio_cap, self.drift_coef = ratio_cap, drift_coef

    def policy_gradient(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_BT = compute_ratio(tokens.logprobs, tokens.generator, tokens.mask)
        kept_BT = self._kept(tokens)
        weighted_BT = ratio_BT
        if self.ratio_cap is not None:
            weighted_BT = ratio_BT.detach().clamp(max=self.ratio_cap) * tokens.logprobs
        loss_BT = torch.where(kept_BT, -weighted_BT * tokens.advantages, 0.0)
        if self.drift_coef:
            loss_BT = loss_BT + self.drift_coef * (tokens.logprobs - tokens.generator).square()
        return loss_BT, {"ratio/mean": ratio_BT, "clip/fraction": ~kept_BT}

    @torch.no_grad()
    def _kept(self, tokens: Tokens) -> Tensor:
        change_BT = tokens.logprobs.exp() - tokens.generator.exp()
        too_high_BT, too_low_BT = change_BT > self.mask_high, change_BT < -self.mask_low
        if self.two_sided:
            return ~(too_high_BT | too_low_BT)
        return ~torch.where(tokens.advantages > 0, too_high_BT, too_low_BT)
