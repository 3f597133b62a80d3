"""A loss that records what it sees."""

from __future__ import annotations

from torch import Tensor

from forge_core.algorithms.losses.grpo import GRPOLoss
from forge_core.algorithms.ops import Totals
from forge_core.data_model import TextTrainBatch
from forge_core.observability.metrics import record_metric
from forge_core.observability.reductions import Reduce


class RecordingLoss(GRPOLoss):
    def from_logprobs(
        self, logprobs_BT: Tensor, entropy_BT: Tensor, batch: TextTrainBatch, totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        record_metric("own/tokens", int((batch.target_mask > 0).sum()), Reduce.SUM)
        return super().from_logprobs(logprobs_BT, entropy_BT, batch, totals)
