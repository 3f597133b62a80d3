"""AdamW and its schedule.

Guarantees:
- The learning rate is a pure function of the optimizer step and the settings, so there is no scheduler state to lose.
- Optimizer state exists from the start, so a checkpoint has the same tensors before and after the first step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from forge_core.training.hf_io import named_parameters
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


def build_optimizer(model: nn.Module, settings: TrainerSettings) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) over every parameter, in one fused kernel."""
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and optimizer state under unique names; writing into these tensors changes the trainer."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in named_parameters(model):
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors
