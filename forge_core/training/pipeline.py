"""Pipeline parallelism: this rank's layers, and the order in which micro-batches go through the stages.

Guarantees:
- The schedule is 1F1B (Narayanan et al. 2021, arXiv 2104.04473): stage s of P holds the activations of at most P - s
  micro-batches. Sends and receives between two neighbours are paired, so no backend has to buffer.
- Micro-batches may have any shapes: every stage has the step's documents and knows what it receives.
- Losses are of the last stage alone.
- No stage waits for a neighbour longer than ``timeout_s``.

torch's own schedules want micro-batches of one shape and a loss of one output; ours have few shapes but several, and
losses with metrics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from forge_core.training.policy import Prepared

FLUSH = 8  # micro-batches per stage between two points where all stages are idle, and may stop


@dataclass(frozen=True)
class Pipeline:
    """``group``: one rank of each stage. ``width``: numbers of a position's hidden state. ``timeout_s``: how long a
    neighbour has. ``tensor``: the ranks that share the positions of a row inside a stage (None: one)."""

    group: dist.ProcessGroup
    width: int
    dtype: torch.dtype
    device: torch.device
    timeout_s: float
    tensor: DeviceMesh | None = None

    @property
    def stage(self) -> int:
        return dist.get_rank(self.group)

    @property
    def last(self) -> bool:
        return self.stage == dist.get_world_size(self.group) - 1

    def forward(self, model: Any, batch: Prepared, finish: Callable[[Prepared], Tensor]) -> Tensor | None:
        """One micro-batch without gradients: what ``finish`` makes of it on the last stage, else None."""
        batch = self._with_inputs(batch, self._exchange(receive_from=-1, like=batch))
        if self.last:
            return finish(batch)
        self._exchange(send_to=1, tensor=_states(model, batch))
        return None

    def forward_backward(self, model: Any, batches: Sequence[Prepared], loss_of: Callable[[Prepared], Tensor]) -> None:
        """Gradients of all micro-batches; ``loss_of`` is called on the last stage."""
        ahead = min(dist.get_world_size(self.group) - self.stage - 1, len(batches))
        waiting: list[tuple[Tensor | None, Tensor]] = []  # (inputs, outputs) of micro-batches to go backward

        def forward(index: int, received: Tensor | None) -> Tensor:
            batch = self._with_inputs(batches[index], received)
            outputs = loss_of(batch) if self.last else _states(model, batch)
            waiting.append((batch.inputs, outputs))
            return outputs

        for index in range(ahead):
            outputs = forward(index, self._exchange(receive_from=-1, like=batches[index]))
            self._exchange(send_to=1, tensor=outputs)
        received = self._exchange(receive_from=-1, like=batches[ahead]) if ahead < len(batches) else None
        for index in range(ahead, len(batches)):
            outputs = forward(index, received)
            gradient = self._exchange(send_to=1, tensor=outputs, receive_from=1, like=batches[index - ahead])
            following = batches[index + 1] if index + 1 < len(batches) else None
            received = self._backward(*waiting.pop(0), gradient, following)
        for index in range(len(batches) - ahead, len(batches)):
            self._backward(*waiting.pop(0), self._exchange(receive_from=1, like=batches[index]), None)

    def _backward(
        self, inputs: Tensor | None, outputs: Tensor, gradient: Tensor | None, following: Prepared | None
    ) -> Tensor | None:
        """Go backward, send the gradient of the inputs on, and receive the inputs of ``following``."""
        torch.autograd.backward(outputs, None if self.last else gradient)
        gradient_of_inputs = None if inputs is None else inputs.grad
        return self._exchange(send_to=-1, tensor=gradient_of_inputs, receive_from=-1, like=following)

    def _with_inputs(self, batch: Prepared, received: Tensor | None) -> Prepared:
        if received is None:
            return batch
        return dataclasses.replace(batch, inputs=received.requires_grad_(torch.is_grad_enabled()), tensor=self.tensor)

    def _exchange(
        self,
        *,
        send_to: int = 0,
        tensor: Tensor | None = None,
        receive_from: int = 0,
        like: Prepared | None = None,
    ) -> Tensor | None:
        """Send to and receive from neighbours (-1: the stage before, 1: the one after; stages that do not exist are
        skipped); what is received has the shape of ``like``'s hidden states."""
        operations, received = [], None
        to, source = self._peer(send_to), self._peer(receive_from)
        if to is not None and tensor is not None:
            operations.append(dist.P2POp(dist.isend, tensor.detach().contiguous(), to, self.group))
        if source is not None and like is not None:
            received = torch.empty(self._shape(like), dtype=self.dtype, device=self.device)
            operations.append(dist.P2POp(dist.irecv, received, source, self.group))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            self._finish(work)
        return received

    def _finish(self, work: dist.Work) -> None:
        """Wait; a GPU's stream waits in our stead, and NCCL's watchdog keeps the limit."""
        if self.device.type == "cpu":  # gloo's sends and receives know the limit alone that their group was made with
            work.wait(timedelta(seconds=self.timeout_s))
        else:
            work.wait()

    def _peer(self, step: int) -> int | None:
        neighbour = self.stage + step
        if step == 0 or not 0 <= neighbour < dist.get_world_size(self.group):
            return None
        return dist.get_global_rank(self.group, neighbour)

    def _shape(self, batch: Prepared) -> tuple[int, int, int]:
        rows, length = batch.batch.input_ids.shape
        return rows, length // (1 if self.tensor is None else self.tensor.size()), self.width


def stage_layers(n_layers: int, stage: int, stages: int) -> range:
    """The layers of a stage: contiguous, as even as can be."""
    return range(n_layers * stage // stages, n_layers * (stage + 1) // stages)


def _states(model: Any, batch: Prepared) -> Tensor:
    """The hidden states that a stage hands on (this rank's part)."""
    states = model(batch.model_inputs, batch.positions, batch.mask)
    return states.to_local() if isinstance(states, DTensor) else states
