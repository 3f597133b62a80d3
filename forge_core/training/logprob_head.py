"""Log-probabilities and entropies of chosen tokens, without the ``[B, T, V]`` logits.

Guarantees:
- Only hidden states at positions that count go through the output matrix.
- Memory: logits are computed ``_CHUNK`` numbers at a time. Up to ``_KEPT`` are kept for the backward pass; beyond
  that the backward pass computes each chunk again (one more matrix product, like activation checkpointing).
- Logits are divided by the temperature in float32; results are float32.

For logits z = h W^T / temperature, p = softmax(z), target y and entropy H = -sum p log p:
d log p_y / dz = onehot(y) - p   and   dH / dz = -p (log p + H).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK = 1 << 24  # logits: 64 MiB in float32
_KEPT = 1 << 26  # logits: 256 MiB in float32


def target_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution in nats: two ``[N]`` float32 tensors."""
    return _TargetLogprobs.apply(hidden_ND, weight_VD, target_N, temperature)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        keep = any(ctx.needs_input_grad) and hidden_ND.shape[0] * weight_VD.shape[0] <= _KEPT
        logprobs_N, entropy_N = (hidden_ND.new_empty(len(target_N), dtype=torch.float32) for _ in range(2))
        kept = []
        for part in _chunks(hidden_ND, weight_VD):
            logp_CV = _log_softmax(hidden_ND[part], weight_VD, temperature)
            logprobs_N[part] = logp_CV.gather(1, target_N[part, None]).squeeze(1)
            entropy_N[part] = -(logp_CV.exp() * logp_CV).sum(1)
            if keep:
                kept.append(logp_CV)
        ctx.save_for_backward(hidden_ND, weight_VD, target_N, entropy_N, *kept)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, None, None]:
        hidden_ND, weight_VD, target_N, entropy_N, *kept = ctx.saved_tensors
        grad_logprobs_N, grad_entropy_N = grads
        if grad_entropy_N is not None and not grad_entropy_N.any():
            grad_entropy_N = None  # a loss without an entropy bonus: half of the work falls away
        grad_hidden_ND, grad_weight_VD = torch.empty_like(hidden_ND), torch.zeros_like(weight_VD, dtype=torch.float32)
        for i, part in enumerate(_chunks(hidden_ND, weight_VD)):
            logp_CV = kept[i] if kept else _log_softmax(hidden_ND[part], weight_VD, ctx.temperature)
            p_CV = logp_CV.exp()
            grad_CV = torch.zeros_like(p_CV)
            if grad_logprobs_N is not None:
                grad_C1 = grad_logprobs_N[part, None]
                grad_CV -= grad_C1 * p_CV
                grad_CV.scatter_add_(1, target_N[part, None], grad_C1)
            if grad_entropy_N is not None:
                grad_CV -= grad_entropy_N[part, None] * p_CV * (logp_CV + entropy_N[part, None])
            grad_CV = (grad_CV / ctx.temperature).to(hidden_ND.dtype)
            grad_hidden_ND[part] = grad_CV @ weight_VD
            grad_weight_VD += grad_CV.T @ hidden_ND[part]
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), None, None


def _chunks(hidden_ND: Tensor, weight_VD: Tensor) -> list[slice]:
    size = max(_CHUNK // weight_VD.shape[0], 1)
    return [slice(start, start + size) for start in range(0, hidden_ND.shape[0], size)]


def _log_softmax(hidden_CD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax((hidden_CD @ weight_VD.T).float() / temperature, dim=-1)
