"""SAPO: Soft Adaptive Policy Optimization.

    L = agg( -(4 / tau) sigmoid(tau (r - 1)) A ),   r = exp(l - a),   tau = tau_pos where A > 0, else tau_neg

A smooth gate in place of the clip: its slope is 1 at r = 1 (on-policy the gradient is REINFORCE's) and fades as r
leaves 1, faster for bad tokens (larger tau).

Source: arXiv 2511.20347, tau 1.0 and 1.05, mean per sequence. Differences: AReaL takes the mean over tokens and adds a
sequence-level gate that the paper does not have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_core.algorithms.corrections import Correction
from forge_core.algorithms.losses.base import PolicyLoss, Tokens
from forge_core.algorithms.ops import AggregationType, KLType, compute_ratio


class SAPOLoss(PolicyLoss):
    """``tau_pos``, ``tau_neg``: temperatures of the gate for good and for bad tokens. The rest: see PolicyLoss."""

    def __init__(
        self,
        tau_pos: float = 1.0,
        tau_neg: float = 1.05,
        beta: float = 0.0,
        agg_type: AggregationType = "sequence_mean",
        entropy_coef: float = 0.0,
        *,
        kl_type: KLType = "k3",
        correction: Correction | None = None,
    ) -> None:
        super().__init__(beta, agg_type, entropy_coef, kl_type=kl_type, correction=correction)
        self.tau_pos, self.tau_neg = tau_pos, tau_neg

    def policy_gradient(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_BT = compute_ratio(tokens.logprobs, tokens.anchor, tokens.mask)
        tau_BT = torch.full_like(ratio_BT, self.tau_neg).masked_fill(tokens.advantages > 0, self.tau_pos)
        gate_BT = torch.sigmoid(tau_BT * (ratio_BT - 1.0)) * 4.0 / tau_BT
        return -gate_BT * tokens.advantages, {"ratio/mean": ratio_BT}
