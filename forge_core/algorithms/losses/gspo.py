"""GSPO: Group Sequence Policy Optimization.

    L = agg( max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A) ),   s_i = exp(mean_t (l - a))

One ratio a sequence: the geometric mean of its tokens' ratios. ``variant``:
- ``token`` (GSPO-token): the same value, and each position has the gradient of its own log-probability; so advantages
  may differ inside a sequence;
- ``sequence``: s is differentiated as it stands.
Values are equal, and gradients too where the advantage is constant in a sequence, as in every run with one reward an
episode.

Source: arXiv 2507.18071 (clip 3e-4 and 4e-4: the mean of many log-ratios is close to 0).
Differences: verl and SkyRL have ``token``, TRL and OpenRLHF ``sequence``; AReaL takes the mean over tokens, so that
long sequences weigh more; verl and SkyRL cap log s at 10, here it is +-20 as everywhere.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from forge_core.algorithms.corrections import Correction
from forge_core.algorithms.losses.base import PolicyLoss, Tokens
from forge_core.algorithms.losses.grpo import clipped_policy_gradient
from forge_core.algorithms.ops import MAX_LOG_RATIO, AggregationType, KLType, compute_ratio, sequence_mean


class GSPOLoss(PolicyLoss):
    """``clip_low``, ``clip_high``: s is clipped to [1 - clip_low, 1 + clip_high]. The rest: see PolicyLoss."""

    def __init__(
        self,
        clip_low: float = 3e-4,
        clip_high: float = 4e-4,
        beta: float = 0.0,
        agg_type: AggregationType = "sequence_mean",
        entropy_coef: float = 0.0,
        *,
        variant: Literal["token", "sequence"] = "token",
        kl_type: KLType = "k3",
        correction: Correction | None = None,
    ) -> None:
        super().__init__(beta, agg_type, entropy_coef, kl_type=kl_type, correction=correction)
        self.clip_low, self.clip_high, self.variant = clip_low, clip_high, variant

    def policy_gradient(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_BT = self._ratio(tokens)
        loss_BT, clipped_BT = clipped_policy_gradient(ratio_BT, tokens.advantages, self.clip_low, self.clip_high)
        return loss_BT, {"ratio/mean": ratio_BT, "clip/fraction": clipped_BT}

    def _ratio(self, tokens: Tokens) -> Tensor:
        if self.variant == "token":
            return compute_ratio(tokens.logprobs, tokens.anchor, tokens.mask, "sequence", tokens.document_ids)
        log_ratio_BT = sequence_mean(tokens.logprobs - tokens.anchor, tokens.mask, tokens.document_ids)
        return log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
