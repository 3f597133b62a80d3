"""AdamW and its schedule.

Guarantees:
- The learning rate is a pure function of the optimizer step and the settings, so there is no scheduler state to lose.
- The gradient norm is that of the whole model, whatever part of it this rank has.
- Gradients that are not finite change nothing, neither parameters nor state.
- Optimizer state exists from the start, so a checkpoint has the same tensors before and after the first step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from forge_core.training.settings import TrainerSettings


def learning_rate(step: int, settings: TrainerSettings) -> float:
    """The rate of optimizer step ``step`` (counted from 0).

    Linear warm-up reaches the peak at step ``warmup_steps - 1``; the decay starts there and reaches
    ``lr_min_ratio * learning_rate`` at ``total_steps``, where it stays.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    span = max(settings.total_steps - settings.warmup_steps, 1)
    progress = min((step - settings.warmup_steps) / span, 1.0)
    if settings.lr_decay == "constant":
        return settings.learning_rate
    remaining = 1.0 - progress if settings.lr_decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.learning_rate * (settings.lr_min_ratio + (1.0 - settings.lr_min_ratio) * remaining)


class ShardedAdamW:
    """AdamW (arXiv 1711.05101) over this rank's part of every parameter, in one fused kernel.

    It works on plain tensors that share the parameters' memory: through DTensors, each of hundreds of parameters would
    cost the host tens of microseconds a step while a GPU waits.
    ``replicas``: how many ranks hold the same part of a parameter that tensor parallelism does not divide.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: TrainerSettings, replicas: int = 1) -> None:
        self._named = list(parameters.items())
        self._parts = [_part(parameter) for _, parameter in self._named]
        self._shared = [replicas > 1 and _is_replicated(parameter) for _, parameter in self._named]
        self._replicas, self._max_norm = replicas, settings.max_norm
        self._adamw = torch.optim.AdamW(
            self._parts,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        for part in self._parts:
            self._adamw.state[part] = {
                "step": torch.zeros((), dtype=torch.float32, device=part.device),
                "exp_avg": torch.zeros_like(part, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(part, requires_grad=False),
            }

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        """Per part of a parameter its state."""
        return self._adamw.state

    @torch.no_grad()
    def clip(self) -> Tensor:
        """Scale the gradients down to ``max_norm``; returns the norm that they had, over all ranks, on the device."""
        for part, (_, parameter) in zip(self._parts, self._named, strict=True):
            if part is not parameter:  # FSDP may have moved the memory at its first step
                part.data, part.grad = _local(parameter), None if parameter.grad is None else _local(parameter.grad)
        own = [part.grad for part, shared in zip(self._parts, self._shared, strict=True) if not shared]
        norm = get_total_norm([grad for grad in own if grad is not None], foreach=True)
        if dist.get_world_size() > 1:
            norm = self._over_ranks(norm)
        clip_grads_with_norm_(self._parts, self._max_norm, norm, foreach=True)
        return norm

    def _over_ranks(self, norm: Tensor) -> Tensor:
        squared = norm.square()
        shared = [part.grad for part, shared in zip(self._parts, self._shared, strict=True) if shared]
        if shared:  # each of the replicas adds its share
            squared += get_total_norm([g for g in shared if g is not None], foreach=True).square() / self._replicas
        dist.all_reduce(squared)
        return squared.sqrt()

    def step(self, rate: float, norm: Tensor) -> None:
        """One update at learning rate ``rate``, unless ``norm``, that of the gradients, is not finite: then nothing
        changes. Nobody waits for the device to know it."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        # The fused kernel looks at this.
        self._adamw.found_inf = (~norm.isfinite()).to(torch.float32)  # type: ignore[attr-defined]
        self._adamw.step()

    def clear(self) -> None:
        """Forget the gradients."""
        for part, (_, parameter) in zip(self._parts, self._named, strict=True):
            part.grad = parameter.grad = None

    def named_state(self) -> dict[str, Tensor]:
        """Parameters and optimizer state under unique names; writing into these tensors changes the trainer."""
        tensors: dict[str, Tensor] = {}
        for part, (name, parameter) in zip(self._parts, self._named, strict=True):
            tensors[f"model.{name}"] = parameter.detach()
            for key, value in self._adamw.state[part].items():
                tensors[f"optimizer.{name}.{key}"] = _like(parameter, value) if value.ndim else value
        return tensors


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _part(parameter: nn.Parameter) -> nn.Parameter:
    """This rank's part of the parameter: a plain tensor on the same memory."""
    return nn.Parameter(_local(parameter.detach())) if isinstance(parameter, DTensor) else parameter


def _is_replicated(parameter: Tensor) -> bool:
    """Whether the ranks of the last mesh axis, tensor parallelism, all have the same."""
    return isinstance(parameter, DTensor) and parameter.placements[-1].is_replicate()


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """This rank's ``value`` as the whole parameter is divided."""
    if not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
