"""GRPO: clipped policy gradient with group-relative advantages and a KL penalty.

    L = agg( -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + beta k3 - entropy_coef H )

with ``r = exp(logprob - generator_logprob)``: the ratio's denominator is always the log-probability that the sampler
stored, so off-policy batches are corrected for their age and for kernel differences alike.

Sources: GRPO (arXiv 2402.03300), asymmetric clip from DAPO (arXiv 2503.14476), fixed horizon from Dr. GRPO
(arXiv 2503.20783). Differences: torchforge's SimpleGRPOLoss has ratio 1 and no clip; the reference log-probabilities
carry no gradient here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_core.algorithms.ops import (
    AggregationType,
    Totals,
    aggregate,
    compute_entropy,
    compute_kl,
    compute_logprobs,
    compute_ratio,
)
from forge_core.data_model import TextTrainBatch


class GRPOLoss:
    """``clip_low``, ``clip_high``: the ratio is clipped to [1 - clip_low, 1 + clip_high]. ``beta``: weight of the KL
    penalty. ``agg_type``: see ``ops.aggregate``. ``entropy_coef``: weight of the entropy bonus."""

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        beta: float = 0.1,
        agg_type: AggregationType = "fixed_horizon",
        entropy_coef: float = 0.0,
    ) -> None:
        self.clip_low, self.clip_high, self.beta = clip_low, clip_high, beta
        self.agg_type, self.entropy_coef = agg_type, entropy_coef

    def from_logprobs(
        self, logprobs_BT: Tensor, entropy_BT: Tensor, batch: TextTrainBatch, totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss share and metrics (which add up over micro-batches) of one micro-batch.

        ``logprobs_BT`` and ``entropy_BT`` belong to ``batch.target_ids`` at the sampling temperature.
        Raises ValueError when the batch lacks what the loss needs.
        """
        if batch.generator_logprobs is None:
            raise ValueError("GRPOLoss needs generator_logprobs: the sampler must return log-probabilities")
        if self.beta > 0 and batch.ref_logprobs is None:
            raise ValueError(f"GRPOLoss has beta={self.beta} but the batch has no ref_logprobs: set grpo.beta=0")
        mask_BT = batch.target_mask
        ratio_BT = compute_ratio(logprobs_BT, batch.generator_logprobs, mask_BT)
        loss_BT, clipped_BT = self._policy_gradient(ratio_BT, batch.target_weights)
        kl_BT = torch.zeros_like(loss_BT)
        if batch.ref_logprobs is not None:
            kl_BT = compute_kl(logprobs_BT, batch.ref_logprobs, mask_BT)
        loss_BT = loss_BT + self.beta * kl_BT - self.entropy_coef * entropy_BT
        loss = aggregate(loss_BT, mask_BT, totals, self.agg_type, batch.document_ids)
        gap_BT = (logprobs_BT - batch.generator_logprobs).abs()
        with torch.no_grad():
            per_token = {"entropy": entropy_BT, "kl": kl_BT, "ratio/mean": ratio_BT, "clip/fraction": clipped_BT}
            per_token["mismatch/mean_abs_logprob"] = gap_BT
            metrics = {name: aggregate(x.float(), mask_BT, totals, "token_mean") for name, x in per_token.items()}
        return loss, metrics

    def _policy_gradient(self, ratio_BT: Tensor, advantages_BT: Tensor) -> tuple[Tensor, Tensor]:
        bounded_BT = ratio_BT.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        unclipped_BT, clipped_BT = ratio_BT * advantages_BT, bounded_BT * advantages_BT
        return -torch.minimum(unclipped_BT, clipped_BT), clipped_BT < unclipped_BT

    def __call__(
        self,
        logits: Tensor,
        target_ids: Tensor,
        advantages: Tensor,
        generator_logprobs: Tensor,
        loss_mask: Tensor,
        ref_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a whole, unpacked batch: ``logits [B, T, V]``, the rest ``[B, T]`` (``advantages`` may be ``[B, 1]``).

        Denominators are those of this batch; the fixed horizon is T.
        """
        batch = TextTrainBatch(
            target_ids, target_ids, loss_mask, advantages.expand_as(loss_mask), generator_logprobs, ref_logprobs
        )
        totals = Totals(int(loss_mask.sum()), loss_mask.shape[0], loss_mask.shape[1])
        logprobs_BT, entropy_BT = compute_logprobs(logits, target_ids), compute_entropy(logits)
        return self.from_logprobs(logprobs_BT, entropy_BT, batch, totals)
