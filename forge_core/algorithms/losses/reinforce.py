"""REINFORCE with a bounded importance weight.

    L = agg( -sg(clip(exp(l - b), weight_min, weight_max)) A l )

b is always the sampler's log-probability. With both bounds 1 there is no weight: plain REINFORCE, right on-policy only.
The value holds l itself and means nothing on its own: compare gradients.

Sources: Williams (1992); bounds 0.1 and 10 from torchforge's ReinforceLoss. Differences: verl has no lower bound;
SkyRL's ``importance_sampling_loss`` is ``-A r`` without bounds, with the gradient through r, and a sum instead of a
mean; here that is GRPOLoss with ``clip_low=1, clip_high=inf``.
"""

from __future__ import annotations

from torch import Tensor

from forge_core.algorithms.losses.base import PolicyLoss, Tokens
from forge_core.algorithms.ops import AggregationType, KLType, compute_ratio


class ReinforceLoss(PolicyLoss):
    """``weight_min``, ``weight_max``: bounds of the importance weight. The rest: see PolicyLoss."""

    def __init__(
        self,
        weight_min: float = 0.1,
        weight_max: float = 10.0,
        beta: float = 0.0,
        agg_type: AggregationType = "token_mean",
        entropy_coef: float = 0.0,
        *,
        kl_type: KLType = "k3",
    ) -> None:
        super().__init__(beta, agg_type, entropy_coef, kl_type=kl_type)
        self.weight_min, self.weight_max = weight_min, weight_max

    def policy_gradient(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_BT = compute_ratio(tokens.logprobs, tokens.generator, tokens.mask).detach()
        weight_BT = ratio_BT.clamp(self.weight_min, self.weight_max)
        loss_BT = -weight_BT * tokens.advantages * tokens.logprobs
        return loss_BT, {"ratio/mean": ratio_BT, "clip/fraction": weight_BT != ratio_BT}
