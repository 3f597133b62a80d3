"""DAPO: Decoupled Clip and Dynamic sAmpling Policy Optimization.

    L = agg( max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) ),   r = exp(l - a);   where A < 0: at most -c A

"Clip-higher": clip_high above clip_low leaves room for unlikely tokens to grow. The dual clip (c = ``dual_clip``, PPO
for MOBA games, arXiv 1912.09729) bounds the loss of a bad token whose ratio exploded; None: no dual clip. The paper
has no KL penalty (``beta=0``) and takes the mean over tokens. The other two parts of DAPO are no part of the loss:
dynamic sampling (``filters.dynamic_sampling``) and the overlong penalty (``algorithms/shaping.py``).

``adaptive_kl`` steers ``beta`` so that the KL to the reference stays near ``kl_target`` (see ``AdaptiveKL``).

Source: arXiv 2503.14476. Differences: verl applies the dual clip (c = 3) in every loss; TRL's ``delta`` caps the ratio,
which is the same where ``delta > 1 + clip_high``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge_core.algorithms.corrections import Correction
from forge_core.algorithms.losses.base import PolicyLoss, Tokens
from forge_core.algorithms.losses.grpo import clipped_policy_gradient
from forge_core.algorithms.ops import AggregationType, KLType, compute_ratio
from forge_core.algorithms.shaping import AdaptiveKL


class DAPOLoss(PolicyLoss):
    """``dual_clip``: c above 1, or None. ``kl_target``: nats per token. The rest: see PolicyLoss and GRPOLoss."""

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        beta: float = 0.0,
        agg_type: AggregationType = "token_mean",
        entropy_coef: float = 0.0,
        *,
        dual_clip: float | None = 3.0,
        adaptive_kl: bool = False,
        kl_target: float = 0.1,
        kl_type: KLType = "k3",
        correction: Correction | None = None,
    ) -> None:
        super().__init__(beta, agg_type, entropy_coef, kl_type=kl_type, correction=correction)
        if adaptive_kl and beta <= 0:
            raise ValueError(f"DAPOLoss: adaptive_kl starts from beta, which is {beta}: set grpo.beta above 0")
        self.clip_low, self.clip_high, self.dual_clip = clip_low, clip_high, dual_clip
        self._controller = AdaptiveKL(kl_target) if adaptive_kl else None

    def policy_gradient(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_BT = tokens.advantages
        ratio_BT = compute_ratio(tokens.logprobs, tokens.anchor, tokens.mask)
        loss_BT, clipped_BT = clipped_policy_gradient(ratio_BT, advantages_BT, self.clip_low, self.clip_high)
        metrics = {"ratio/mean": ratio_BT, "clip/fraction": clipped_BT}
        if self.dual_clip is not None:
            bound_BT = -advantages_BT * self.dual_clip
            metrics["clip/dual_fraction"] = (advantages_BT < 0) & (loss_BT > bound_BT)
            loss_BT = torch.where(advantages_BT < 0, torch.minimum(loss_BT, bound_BT), loss_BT)
        return loss_BT, metrics

    def after_step(self, metrics: dict[str, float]) -> dict[str, float]:
        if self._controller is None:
            return {}
        used, self.beta = self.beta, self._controller.adapt(self.beta, metrics["kl"])
        return {"kl/beta": used}

    def state(self) -> dict[str, Any]:
        return {} if self._controller is None else {"beta": self.beta}

    def load_state(self, state: dict[str, Any]) -> None:
        self.beta = state.get("beta", self.beta)
