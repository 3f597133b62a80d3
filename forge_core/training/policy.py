"""Running the model over packed micro-batches: shared by the trainer and the reference model.

Guarantees:
- Documents of one row never see each other, and results do not depend on what a document was packed with beyond
  rounding.
- Trainer and reference call the same functions on the same layout, so equal weights give equal log-probabilities
  (bitwise on a CPU).
- Nothing waits for the device before all micro-batches are under way: what decides how to compute is read from the
  batch on the CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from forge_core.data_model import TextTrainBatch
from forge_core.stop import StopToken
from forge_core.training.attention import document_mask, one_document_a_row
from forge_core.training.collectives import check_stop
from forge_core.training.packing import PAD_ID, documents

if TYPE_CHECKING:
    from forge_core.training.titan_compat import PolicyModel

_PADDING = {"input_ids": PAD_ID, "document_ids": -1}


@dataclass(frozen=True)
class Prepared:
    """A micro-batch on the device, and how to compute it.

    ``index_N`` are the flat positions that count, ``target_N`` their targets. ``positions`` and ``mask`` are None where
    every row holds one document. ``inputs`` are the hidden states of the pipeline stage before (None on the first), of
    which each rank of ``tensor`` has a part of the positions.
    """

    batch: TextTrainBatch
    index_N: Tensor
    target_N: Tensor
    positions: Tensor | None
    mask: Any
    inputs: Tensor | None = None
    tensor: DeviceMesh | None = None

    @property
    def model_inputs(self) -> Tensor:
        """Token ids, or the hidden states of the stage before."""
        if self.inputs is None:
            return self.batch.input_ids
        if self.tensor is None:
            return self.inputs
        return DTensor.from_local(self.inputs, self.tensor, [Shard(1)], run_check=False)


def prepare(batch: TextTrainBatch, device: torch.device, dtype: torch.dtype, longest: int) -> Prepared:
    """``batch`` on ``device``; the transfer does not wait when the batch is on the CPU.

    ``longest``: how many positions a document may have. A longer row is one for several documents, even when it happens
    to hold one: it keeps its mask and positions, which is another shape of code less.
    """
    index_N = batch.target_mask.flatten().nonzero().squeeze(1)
    target_N = batch.target_ids.flatten()[index_N]
    plain = batch.document_ids is None or (
        batch.input_ids.shape[1] <= longest and one_document_a_row(batch.document_ids)
    )
    tensors = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    moved = {name: _moved(tensor, device) for name, tensor in tensors.items() if tensor is not None}
    there = dataclasses.replace(batch, **moved)
    mask = None if plain or there.document_ids is None else document_mask(there.document_ids, dtype)
    positions = None if plain else there.position_ids
    return Prepared(there, _moved(index_N, device), _moved(target_N, device), positions, mask)


def padded(batch: TextTrainBatch, multiple: int) -> TextTrainBatch:
    """The batch with rows of a length that ``multiple`` divides."""
    missing = -batch.input_ids.shape[1] % multiple
    if missing == 0:
        return batch
    tensors = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    longer = {n: F.pad(t, (0, missing), value=_PADDING.get(n, 0)) for n, t in tensors.items() if t is not None}
    return dataclasses.replace(batch, **longer)


def logits(model: PolicyModel, prepared: Prepared) -> Tensor:
    """All logits, ``[B, T, V]`` in the compute type: for losses that need them; large for a large vocabulary."""
    result = model(prepared.model_inputs, prepared.positions, prepared.mask)
    assert isinstance(result, Tensor)
    return result.full_tensor() if isinstance(result, DTensor) else result


def logprobs(model: PolicyModel, prepared: Prepared, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ``target_ids`` and entropies, ``[B, T]`` float32, zero where ``target_mask`` is 0.

    Logits are divided by ``temperature`` (above 0, else ValueError). Masked positions never reach the output matrix.
    """
    from forge_core.training.titan_compat import HeadQuery

    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probabilities need one above 0")
    query = HeadQuery(prepared.index_N, prepared.target_N, temperature)
    mask_BT = prepared.batch.target_mask
    zeros = torch.zeros(mask_BT.numel(), device=mask_BT.device)
    found = model(prepared.model_inputs, prepared.positions, prepared.mask, query)
    logprobs_BT, entropy_BT = (zeros.index_put((prepared.index_N,), x_N).view_as(mask_BT) for x_N in found)
    return logprobs_BT, entropy_BT


@torch.no_grad()
def document_logprobs(
    compute: Callable[[Prepared], Tensor | None],
    batches: Sequence[TextTrainBatch],
    dtype: torch.dtype,
    device: torch.device,
    longest: int,
    stop: StopToken | None = None,
    *,
    count: int | None = None,
    together: bool = False,
    between: int = 1,
) -> list[list[float]]:
    """Log-probabilities at the masked-in positions of every document, in order of ``document_ids`` (or of rows).

    ``compute``: what gives a micro-batch's log-probabilities ``[B, T]`` (None on a pipeline stage before the last).
    ``count``: how many documents there are; left out: those of the batches. Raises ``Stopped`` between micro-batches
    when ``stop`` is set (``together``: on any rank of the process group, all of which make this call). ``between``: how
    many micro-batches there are from one look for a stop to the next.
    """
    computed = []
    for index, batch in enumerate(batches):
        if index % between == 0:
            check_stop(stop, together)
        computed.append(compute(prepare(batch, device, dtype, longest)))
    results: list[list[float]] = [[] for _ in range(documents(batches) if count is None else count)]
    rows_before = 0
    for batch, logprobs_BT in zip(batches, computed, strict=True):
        if logprobs_BT is None:
            continue
        counted_BT = batch.target_mask > 0
        ids_BT = batch.document_ids
        if ids_BT is None:
            rows = torch.arange(rows_before, rows_before + len(counted_BT))
            ids_BT = rows[:, None].expand_as(counted_BT)
            rows_before += len(counted_BT)
        for document, value in zip(ids_BT[counted_BT].tolist(), logprobs_BT.cpu()[counted_BT].tolist(), strict=True):
            results[document].append(value)
    return results


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
