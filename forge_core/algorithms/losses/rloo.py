"""The sequence-level loss of RLOO: the whole response is one action.

    L = agg( max(-R A_i, -clip(R, 1 - clip_low, 1 + clip_high) A_i) ),   R_i = exp(sum_t (l - a))

R is the ratio of the probabilities of whole sequences: the sum of log-ratios, not their mean (compare GSPO); it is
clamped at exp(+-20). Use it with leave-one-out advantages (``advantages.leave_one_out``). A_i is the mean advantage of
the sequence (its one advantage, in a run).

Source: "Back to Basics" (arXiv 2402.14740); clip as in TRL's RLOOTrainer, which takes the sequence's first advantage.
"""

from __future__ import annotations

from torch import Tensor

from forge_core.algorithms.corrections import Correction
from forge_core.algorithms.losses.base import PolicyLoss, Tokens
from forge_core.algorithms.losses.grpo import clipped_policy_gradient
from forge_core.algorithms.ops import MAX_LOG_RATIO, AggregationType, KLType, sequence_mean, sequence_sum


class RLOOLoss(PolicyLoss):
    """``clip_low``, ``clip_high``: R is clipped to [1 - clip_low, 1 + clip_high]. The rest: see PolicyLoss."""

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
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
        log_ratio_BT = sequence_sum(tokens.logprobs - tokens.anchor, mask_BT, ids_BT)
        ratio_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        advantages_BT = sequence_mean(tokens.advantages, mask_BT, ids_BT)
        loss_BT, clipped_BT = clipped_policy_gradient(ratio_BT, advantages_BT, self.clip_low, self.clip_high)
        return loss_BT, {"ratio/mean": ratio_BT, "clip/fraction": clipped_BT}
