"""CISPO: Clipped IS-weight Policy Optimization.

    L = agg( -sg(clip(r, 1 - clip_low, 1 + clip_high)) A l ),   r = exp(l - a)

The importance weight is clipped and carries no gradient; so every token keeps its gradient, where PPO's clip drops it.
The value holds l itself and means nothing on its own: compare gradients.

Source: MiniMax-M1 (arXiv 2506.13585), which bounds the weight from above only (``clip_low=1``: the lower bound is 0).
Differences: TRL's ``epsilon_high`` is the bound itself, here it is an offset from 1; verl's defaults bound both sides.
"""

from __future__ import annotations

from torch import Tensor

from forge_core.algorithms.corrections import Correction
from forge_core.algorithms.losses.base import PolicyLoss, Tokens
from forge_core.algorithms.ops import AggregationType, KLType, compute_ratio


class CISPOLoss(PolicyLoss):
    """``clip_low``, ``clip_high``: bounds of the weight, as offsets from 1. The rest: see PolicyLoss."""

    def __init__(
        self,
        clip_low: float = 1.0,
        clip_high: float = 4.0,
        beta: float = 0.0,
        agg_type: AggregationType = "token_mean",
        entropy_coef: float = 0.0,
        *,
        kl_type: KLType = "k3",
        correction: Correction | None = None,
    ) -> None:
        super().__init__(beta, agg_type, entropy_coef, kl_type=kl_type, correction=correction)
        self.clip_low, self.clip_high = clip_low, clip_high

    def policy_gradient(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_BT = compute_ratio(tokens.logprobs, tokens.anchor, tokens.mask).detach()
        weight_BT = ratio_BT.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        loss_BT = -weight_BT * tokens.advantages * tokens.logprobs
        return loss_BT, {"ratio/mean": ratio_BT, "clip/fraction": weight_BT != ratio_BT}
