"""Random batches for the tests of losses, as rows and as packed documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_core.algorithms.corrections import IcePop, SequenceMask, TruncatedIS
from forge_core.algorithms.losses import (
    CISPOLoss,
    DAPOLoss,
    DPPOLoss,
    GMPOLoss,
    GRPOLoss,
    GSPOLoss,
    PolicyLoss,
    ReinforceLoss,
    RLOOLoss,
    SAPOLoss,
)
from forge_core.algorithms.metrics import is_maximum
from forge_core.algorithms.ops import Totals
from forge_core.data_model import TextTrainBatch

COMMON = {"beta": 0.05, "entropy_coef": 0.01}
EVERY_LOSS: dict[str, Callable[[], PolicyLoss]] = {
    "grpo": lambda: GRPOLoss(agg_type="sequence_mean", **COMMON),
    "dr-grpo": lambda: GRPOLoss(agg_type="fixed_horizon", **COMMON),
    "dapo": lambda: DAPOLoss(**COMMON),
    "cispo": lambda: CISPOLoss(**COMMON),
    "gspo": lambda: GSPOLoss(0.2, 0.28, **COMMON),
    "gspo-sequence": lambda: GSPOLoss(0.2, 0.28, variant="sequence", **COMMON),
    "sapo": lambda: SAPOLoss(**COMMON),
    "gmpo": lambda: GMPOLoss(**COMMON),
    "rloo": lambda: RLOOLoss(**COMMON),
    "reinforce": lambda: ReinforceLoss(**COMMON),
    "dppo": lambda: DPPOLoss(drift_coef=0.01, **COMMON),
    "dppo-capped": lambda: DPPOLoss(ratio_cap=3.0, two_sided=True, **COMMON),
    "truncated": lambda: GRPOLoss(correction=TruncatedIS("sequence", high=1.5), **COMMON),
    "icepop": lambda: GRPOLoss(agg_type="token_mean", correction=IcePop(0.8, 1.2), **COMMON),
    "sequence-mask": lambda: GSPOLoss(0.2, 0.28, correction=SequenceMask(0.9, 1.1), **COMMON),
}


@dataclass
class Rows:
    """``[B, T]`` tensors of B sequences, padded on the right."""

    logprobs: Tensor
    entropy: Tensor
    mask: Tensor
    advantages: Tensor
    generator: Tensor
    ref: Tensor
    proximal: Tensor

    @property
    def totals(self) -> Totals:
        return Totals(int(self.mask.sum()), len(self.mask), self.mask.shape[1])

    def batch(self, rows: slice | list[int] = slice(None), document_ids: Tensor | None = None) -> TextTrainBatch:
        ids = torch.zeros(self.mask[rows].shape, dtype=torch.long)
        columns = (x[rows] for x in (self.mask, self.advantages, self.generator, self.ref))
        return TextTrainBatch(ids, ids, *columns, None, document_ids, self.proximal[rows])


def random_rows(sequences: int = 6, length: int = 5, seed: int = 0, spread: float = 0.3) -> Rows:
    """Sequences with holes in their masks, one advantage each, and log-ratios of about ``spread``."""
    g = torch.Generator().manual_seed(seed)
    noise = lambda: spread * torch.randn(sequences, length, generator=g, dtype=torch.float64)
    generator = -torch.rand(sequences, length, generator=g, dtype=torch.float64) - 0.1
    mask = (torch.rand(sequences, length, generator=g) > 0.3).double()
    mask[:, 0] = 1.0
    advantages = torch.randn(sequences, 1, generator=g, dtype=torch.float64).expand(sequences, length).clone()
    logprobs = (generator + noise()).requires_grad_()
    proximal, ref = generator + noise() / 3, generator + noise()
    return Rows(logprobs, -logprobs.detach() + 0.5, mask, advantages, generator, ref, proximal)


def evaluate(loss_fn: PolicyLoss, rows: Rows, parts: list, totals: Totals | None = None) -> tuple[float, Tensor, dict]:
    """Loss, gradient with respect to the log-probabilities, and metrics, over ``parts`` of the rows."""
    rows.logprobs.grad = None
    total, sums = 0.0, {}
    for part in parts:
        loss, metrics = loss_fn.from_logprobs(
            rows.logprobs[part], rows.entropy[part], rows.batch(part), totals or rows.totals
        )
        loss.backward()
        total += float(loss.detach())
        for name, value in metrics.items():
            before = sums.get(name, 0.0)
            sums[name] = max(before, float(value)) if is_maximum(name) else before + float(value)
    assert rows.logprobs.grad is not None
    return total, rows.logprobs.grad.clone(), sums


def packed(rows: Rows, order: list[int]) -> tuple[Tensor, Tensor, TextTrainBatch]:
    """The sequences ``order`` side by side in one row, followed by padding: log-probabilities (with gradient to the
    rows'), entropies, and the batch."""
    length = rows.mask.shape[1]
    pad = lambda x, value=0.0: torch.cat([x[order].reshape(1, -1), torch.full((1, 3), value, dtype=x.dtype)], 1)
    ids = torch.tensor([i for i in order for _ in range(length)] + [-1] * 3)[None]
    zeros = torch.zeros(ids.shape, dtype=torch.long)
    columns = (pad(x) for x in (rows.mask, rows.advantages, rows.generator, rows.ref))
    batch = TextTrainBatch(zeros, zeros, *columns, None, ids, pad(rows.proximal))
    return pad(rows.logprobs, -7.0), pad(rows.entropy, 9.0), batch
