"""Losses as the trainer sees them, and the loss of one micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

from torch import Tensor

from forge_core.algorithms.metrics import is_maximum
from forge_core.algorithms.ops import Totals
from forge_core.data_model import TextTrainBatch
from forge_core.training import policy
from forge_core.training.policy import Prepared


class LogprobLoss(Protocol):
    """A loss over log-probabilities: the fast path, which never builds ``[B, T, V]`` logits."""

    def from_logprobs(
        self, logprobs_BT: Tensor, entropy_BT: Tensor, batch: TextTrainBatch, totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the loss over ``totals``, and metrics that add up over micro-batches."""
        ...


LogitsLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
"""``(logits, target_ids, advantages, generator_logprobs, loss_mask, ref_logprobs) -> (loss, metrics)``: means over one
micro-batch, which the trainer weights by the micro-batch's share of loss tokens. Logits are float32, divided by the
temperature."""

Loss = LogprobLoss | LogitsLoss


def micro_loss(
    model: Any, prepared: Prepared, loss_fn: Loss, temperature: float, totals: Totals
) -> tuple[Tensor, dict[str, Any]]:
    """Share of the loss and metrics of one micro-batch, on the device."""
    batch = prepared.batch
    if hasattr(loss_fn, "from_logprobs"):
        logprobs_BT, entropy_BT = policy.logprobs(model, prepared, temperature)
        return loss_fn.from_logprobs(logprobs_BT, entropy_BT, batch, totals)
    loss, metrics = cast(LogitsLoss, loss_fn)(
        policy.logits(model, prepared).float() / temperature,
        batch.target_ids,
        batch.target_weights,
        batch.generator_logprobs,
        batch.target_mask,
        batch.ref_logprobs,
    )
    share = len(prepared.index_N) / max(totals.tokens, 1)
    return loss * share, {n: value if is_maximum(n) else value * share for n, value in metrics.items()}
