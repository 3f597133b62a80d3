"""Supervised loss: cross-entropy of the target tokens.

Invariant: the denominator is the global count of target tokens, so any micro-batch split gives the same gradient.
"""

from __future__ import annotations

from torch import Tensor

from forge_core.algorithms.ops import Totals, aggregate
from forge_core.data_model import TextTrainBatch


class SFTLoss:
    """``L = -sum(mask * weight * logprob) / tokens``; ``target_weights`` are token weights (1 for plain training)."""

    def from_logprobs(
        self, logprobs_BT: Tensor, entropy_BT: Tensor, batch: TextTrainBatch, totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss share and metrics (which add up over micro-batches) of one micro-batch."""
        loss = aggregate(-logprobs_BT * batch.target_weights, batch.target_mask, totals, "token_mean")
        entropy = aggregate(entropy_BT.detach(), batch.target_mask, totals, "token_mean")
        return loss, {"entropy": entropy}

    def state(self) -> dict[str, float]:
        """Nothing is learned here that a checkpoint would have to hold."""
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        """Go on from ``state``."""
