"""Running the model over packed micro-batches: shared by the trainer and the reference model.

Guarantees:
- Documents of one row never see each other, and results do not depend on what a document was packed with beyond
  rounding.
- Trainer and reference call the same functions on the same layout, so equal weights give bitwise equal
  log-probabilities.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_core.data_model import TextTrainBatch
from forge_core.stop import StopToken
from forge_core.training.packing import documents

if TYPE_CHECKING:
    from forge_core.training.titan_compat import PolicyModel


def to_device(batch: TextTrainBatch, device: torch.device) -> TextTrainBatch:
    """The batch with every tensor on ``device``."""
    tensors = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return dataclasses.replace(batch, **{name: t.to(device) for name, t in tensors.items() if t is not None})


def logits(model: PolicyModel, batch: TextTrainBatch, dtype: torch.dtype) -> Tensor:
    """All logits, ``[B, T, V]`` in the compute type: for losses that need them; large for a large vocabulary."""
    positions, mask = _attention(batch, dtype)
    result = model(batch.input_ids, positions, mask)
    assert isinstance(result, Tensor)
    return result


def logprobs(
    model: PolicyModel, batch: TextTrainBatch, dtype: torch.dtype, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ``target_ids`` and entropies, ``[B, T]`` float32, zero where ``target_mask`` is 0.

    Logits are divided by ``temperature`` (above 0, else ValueError). Masked positions never reach the output matrix.
    """
    from forge_core.training.titan_compat import HeadQuery

    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probabilities need one above 0")
    index_N = batch.target_mask.flatten().nonzero().squeeze(1)
    query = HeadQuery(index_N, batch.target_ids.flatten()[index_N], temperature)
    positions, mask = _attention(batch, dtype)
    zeros = torch.zeros(batch.target_mask.numel(), device=index_N.device)
    found = model(batch.input_ids, positions, mask, query)
    logprobs_BT, entropy_BT = (zeros.index_put((index_N,), x_N).view_as(batch.target_mask) for x_N in found)
    return logprobs_BT, entropy_BT


@torch.no_grad()
def document_logprobs(
    model: PolicyModel,
    batches: Sequence[TextTrainBatch],
    dtype: torch.dtype,
    temperature: float,
    device: torch.device,
    stop: StopToken | None = None,
) -> list[list[float]]:
    """Log-probabilities at the masked-in positions of every document, in order of ``document_ids`` (or of rows).

    Raises ``Stopped`` between micro-batches when ``stop`` is set.
    """
    results: list[list[float]] = [[] for _ in range(documents(batches))]
    rows_before = 0
    for batch in batches:
        if stop is not None:
            stop.check()
        logprobs_BT, _ = logprobs(model, to_device(batch, device), dtype, temperature)
        counted_BT = batch.target_mask > 0
        ids_BT = batch.document_ids
        if ids_BT is None:
            rows = torch.arange(rows_before, rows_before + len(counted_BT))
            ids_BT = rows[:, None].expand_as(counted_BT)
            rows_before += len(counted_BT)
        for document, value in zip(ids_BT[counted_BT].tolist(), logprobs_BT.cpu()[counted_BT].tolist(), strict=True):
            results[document].append(value)
    return results


def _attention(batch: TextTrainBatch, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Positions and additive mask ``[B, 1, T, T]``; both None where every row holds one document from its start.

    Plain causal attention is right for such rows (padding comes last) and needs no O(T^2) memory.
    """
    ids_BT = batch.document_ids
    if ids_BT is None or bool(((ids_BT == ids_BT[:, :1]) | (ids_BT < 0)).all()):
        return None, None
    length = ids_BT.shape[1]
    same_BTT = ids_BT[:, :, None] == ids_BT[:, None, :]
    visible_BTT = same_BTT & torch.ones(length, length, dtype=torch.bool, device=ids_BT.device).tril()
    mask_BTT = torch.zeros(visible_BTT.shape, dtype=dtype, device=ids_BT.device)
    return batch.position_ids, mask_BTT.masked_fill_(~visible_BTT, float("-inf"))[:, None]
