"""Log-probabilities and entropies of chosen tokens, without the ``[B, T, V]`` logits.

Guarantees:
- Only hidden states at positions that count go through the output matrix.
- Memory: logits are computed a chunk at a time. Up to a limit they are kept for the backward pass; beyond it the
  backward pass computes each chunk again (one more matrix product, like activation checkpointing). On a CPU a chunk is
  ``_CHUNK`` numbers and ``_KEPT`` are kept; for a GPU see ``logprob_kernels.py``.
- Logits are divided by the temperature in float32; results are float32.
- The vocabulary may be divided among ranks: each sees its own logits, and what is exchanged is a few numbers a token.

For logits z = h W^T / temperature, p = softmax(z), target y and entropy H = -sum p log p:
d log p_y / dz = onehot(y) - p   and   dH / dz = -p (log p + H).

Over ranks r with the logits z_r: log p_r = log_softmax(z_r) + lse_r - lse, where lse_r = logsumexp(z_r) and
lse = logsumexp_r(lse_r); log p_y and H are sums over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK = 1 << 24  # logits: 64 MiB in float32
_KEPT = 1 << 26  # logits: 256 MiB in float32


@dataclass(frozen=True)
class Vocabulary:
    """Which part of the vocabulary this rank has: tokens ``start`` to ``start + size``; ``group`` has all of it."""

    group: dist.ProcessGroup
    start: int
    size: int

    @classmethod
    def part(cls, group: dist.ProcessGroup, vocab_size: int) -> Vocabulary:
        """This rank's part when the rows of the output matrix are divided evenly, the last ranks having fewer."""
        share = -(-vocab_size // dist.get_world_size(group))
        start = min(dist.get_rank(group) * share, vocab_size)
        return cls(group, start, min(share, vocab_size - start))

    def own(self, target_N: Tensor) -> tuple[Tensor, Tensor]:
        """The targets as rows of this rank's matrix (0 where another rank has them), and which are this rank's."""
        index_N = target_N - self.start
        here_N = (index_N >= 0) & (index_N < self.size)
        return index_N.where(here_N, 0), here_N

    def logsumexp(self, lse_N: Tensor) -> Tensor:
        """Of all ranks' logits, given this rank's."""
        lse_RN = lse_N.new_empty(dist.get_world_size(self.group), len(lse_N))
        dist.all_gather(list(lse_RN), lse_N.contiguous(), group=self.group)
        return lse_RN.logsumexp(0)

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values


def target_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float, vocabulary: Vocabulary | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution in nats: two ``[N]`` float32 tensors.

    ``vocabulary``: which rows of the output matrix ``weight_VD`` has; None: all. With several ranks the gradient of
    ``hidden_ND`` is this rank's part: their sum is the whole.
    """
    if hidden_ND.is_cuda:
        from forge_core.training.logprob_kernels import FusedTargetLogprobs

        return FusedTargetLogprobs.apply(hidden_ND, weight_VD, target_N, temperature, vocabulary)
    return _TargetLogprobs.apply(hidden_ND, weight_VD, target_N, temperature, vocabulary)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        target_N: Tensor,
        temperature: float,
        vocabulary: Vocabulary | None,
    ) -> tuple[Tensor, Tensor]:
        keep = any(ctx.needs_input_grad) and hidden_ND.shape[0] * weight_VD.shape[0] <= _KEPT
        found_2N = hidden_ND.new_empty(2, len(target_N), dtype=torch.float32)
        kept, here_N1 = [], None
        if vocabulary is not None:
            target_N, here_N = vocabulary.own(target_N)
            here_N1 = here_N[:, None]
        for part in _chunks(hidden_ND, weight_VD):
            logp_CV = _log_softmax(hidden_ND[part], weight_VD, temperature, vocabulary)
            found_2N[0, part] = logp_CV.gather(1, target_N[part, None]).squeeze(1)
            found_2N[1, part] = -(logp_CV.exp() * logp_CV).sum(1)
            if keep:
                kept.append(logp_CV)
        if vocabulary is not None:
            found_2N[0].mul_(here_N)
            vocabulary.sum(found_2N)
        logprobs_N, entropy_N = found_2N[0].clone(), found_2N[1].clone()  # views would upset FSDP
        ctx.save_for_backward(hidden_ND, weight_VD, target_N, here_N1, entropy_N, *kept)
        ctx.temperature, ctx.vocabulary = temperature, vocabulary
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_ND, weight_VD, target_N, here_N1, entropy_N, *kept = ctx.saved_tensors
        grad_logprobs_N, grad_entropy_N = grads
        if grad_entropy_N is not None and not grad_entropy_N.any():
            grad_entropy_N = None  # a loss without an entropy bonus: half of the work falls away
        grad_hidden_ND, grad_weight_VD = torch.empty_like(hidden_ND), torch.zeros_like(weight_VD, dtype=torch.float32)
        for i, part in enumerate(_chunks(hidden_ND, weight_VD)):
            logp_CV = kept[i] if kept else _log_softmax(hidden_ND[part], weight_VD, ctx.temperature, ctx.vocabulary)
            p_CV = logp_CV.exp()
            grad_CV = torch.zeros_like(p_CV)
            if grad_logprobs_N is not None:
                grad_C1 = grad_logprobs_N[part, None]
                grad_CV -= grad_C1 * p_CV
                grad_CV.scatter_add_(1, target_N[part, None], grad_C1 if here_N1 is None else grad_C1 * here_N1[part])
            if grad_entropy_N is not None:
                grad_CV -= grad_entropy_N[part, None] * p_CV * (logp_CV + entropy_N[part, None])
            grad_CV = (grad_CV / ctx.temperature).to(hidden_ND.dtype)
            grad_hidden_ND[part] = grad_CV @ weight_VD
            grad_weight_VD += grad_CV.T @ hidden_ND[part]
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), None, None, None


def _chunks(hidden_ND: Tensor, weight_VD: Tensor) -> list[slice]:
    size = max(_CHUNK // weight_VD.shape[0], 1)
    return [slice(start, start + size) for start in range(0, hidden_ND.shape[0], size)]


def _log_softmax(hidden_CD: Tensor, weight_VD: Tensor, temperature: float, vocabulary: Vocabulary | None) -> Tensor:
    logits_CV = (hidden_CD @ weight_VD.T).float() / temperature
    logp_CV = torch.log_softmax(logits_CV, dim=-1)
    if vocabulary is None:
        return logp_CV
    lse_C = logits_CV.logsumexp(1)
    return logp_CV.add_((lse_C - vocabulary.logsumexp(lse_C))[:, None])
