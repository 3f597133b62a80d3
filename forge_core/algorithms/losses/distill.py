"""On-policy distillation: the reverse KL divergence to a teacher, on the policy's own samples.

    L = beta * agg( -sg(min(exp(l - b), weight_max)) A l ),   A = clip(t - b, -max_gap, max_gap)

t: the teacher's log-probability of a sampled token (``ref_logprobs``: the teacher takes the reference model's place),
b: the sampler's. In expectation over samples the gradient is that of KL(policy || teacher), token by token: a token
that the teacher finds likelier than the policy does is made likelier. Rewards play no part; ``kl`` is the divergence.

Source: the sampled reverse KL of on-policy distillation (arXiv 2306.13649; 2306.08543 for the policy-gradient form).
Difference: one sampled token stands for the distribution at its position, so no logits of the teacher are needed.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from forge_core.algorithms.losses.base import PolicyLoss, Tokens
from forge_core.algorithms.ops import AggregationType, Totals, compute_ratio, widen
from forge_core.data_model import TextTrainBatch


class DistillLoss(PolicyLoss):
    """``max_gap``: bound of a token's advantage, in nats. ``weight_max``: largest importance weight. The rest: see
    PolicyLoss; ``beta`` weights the whole loss."""

    penalises = False

    def __init__(
        self,
        beta: float = 1.0,
        agg_type: AggregationType = "token_mean",
        entropy_coef: float = 0.0,
        *,
        max_gap: float = 10.0,
        weight_max: float = 2.0,
    ) -> None:
        super().__init__(beta, agg_type, entropy_coef, kl_type="k1")
        self.max_gap, self.weight_max = max_gap, weight_max

    def from_logprobs(
        self, logprobs_BT: Tensor, entropy_BT: Tensor, batch: TextTrainBatch, totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As of any policy loss; the advantages of the batch are the teacher's. Raises ValueError without its
        log-probabilities."""
        if batch.ref_logprobs is None or batch.generator_logprobs is None:
            raise ValueError("DistillLoss needs the log-probabilities of teacher and sampler: set grpo.beta above 0")
        gap_BT = widen(batch.ref_logprobs) - widen(batch.generator_logprobs)
        taught = dataclasses.replace(batch, target_weights=gap_BT.clamp(-self.max_gap, self.max_gap))
        return super().from_logprobs(logprobs_BT, entropy_BT, taught, totals)

    def policy_gradient(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_BT = compute_ratio(tokens.logprobs, tokens.generator, tokens.mask).detach()
        weight_BT = ratio_BT.clamp(max=self.weight_max)
        loss_BT = -self.beta * weight_BT * tokens.advantages * tokens.logprobs
        return loss_BT, {"ratio/mean": ratio_BT, "clip/fraction": weight_BT != ratio_BT}
