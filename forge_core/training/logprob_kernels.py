"""The log-probability head on a GPU: two passes over the logits, compiled, and no copy of them in float32.

Guarantees (besides those of ``logprob_head.py``):
- Logits stay in the compute type; softmax, entropy and gradients are computed from them in float32, in registers.
- All logits of a micro-batch are kept for the backward pass up to a sixteenth of the GPU's memory, and become their own
  gradient in place. Beyond that, chunks of ``_CHUNK`` logits are computed again, and the gradient of the weight is
  accumulated in float32.
- Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from forge_core.training.logprob_head import Vocabulary

_CHUNK = 1 << 28  # logits: 512 MiB in bfloat16
_ROWS = 128  # a chunk has a multiple of this many rows, for the matrix products' sake
_KEPT_SHARE = 16  # a sixteenth of the memory


class FusedTargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        target_N: Tensor,
        temperature: float,
        vocabulary: Vocabulary | None,
    ) -> tuple[Tensor, Tensor]:
        own_N = target_N
        if vocabulary is not None:
            index_N, here_N = vocabulary.own(target_N)
            own_N = index_N.where(here_N, -1)
        keep = any(ctx.needs_input_grad) and _fits(hidden_ND, weight_VD)
        logits_NV = hidden_ND.new_empty(len(own_N), len(weight_VD)) if keep else None
        found_3N = hidden_ND.new_empty(3, len(own_N), dtype=torch.float32)
        for part in _chunks(hidden_ND, weight_VD):  # whether kept or not: the same products, so the same bits
            out_CV = None if logits_NV is None else logits_NV[part]
            logits_CV = torch.mm(hidden_ND[part], weight_VD.T, out=out_CV)
            found = _by_rows(_statistics, 1.0 / temperature, logits_CV, own_N[part])
            for row, values_C in enumerate(found):
                found_3N[row, part] = values_C
        logprobs_N, entropy_N, lse_N = _combined(found_3N, vocabulary)
        ctx.save_for_backward(hidden_ND, weight_VD, own_N, lse_N, entropy_N, logits_NV)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_ND, weight_VD, own_N, lse_N, entropy_N, logits_NV = ctx.saved_tensors
        scale, rows = 1.0 / ctx.temperature, [own_N, lse_N, torch.zeros_like(lse_N) if grads[0] is None else grads[0]]
        gradient: Callable[..., None] = _gradient
        if grads[1] is not None:
            gradient, rows = _gradient_with_entropy, [*rows, entropy_N, grads[1]]
        if logits_NV is not None and len(logits_NV):
            _by_rows(gradient, scale, logits_NV, *rows)
            return logits_NV @ weight_VD, logits_NV.T @ hidden_ND, None, None, None
        grad_hidden_ND, grad_weight_VD = torch.zeros_like(hidden_ND), torch.zeros_like(weight_VD, dtype=torch.float32)
        for part in _chunks(hidden_ND, weight_VD):
            logits_CV = hidden_ND[part] @ weight_VD.T
            _by_rows(gradient, scale, logits_CV, *(row_N[part] for row_N in rows))
            grad_hidden_ND[part] = logits_CV @ weight_VD
            _accumulate(grad_weight_VD, logits_CV.T, hidden_ND[part])
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), None, None, None


def _statistics(scale: float, logits_CV: Tensor, own_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of ``z = logits * scale``: z at the target (0 where own is -1), the mean of z under softmax(z), and
    logsumexp(z)."""
    z_CV = logits_CV.float() * scale
    largest_C1 = z_CV.amax(1, keepdim=True)
    e_CV = (z_CV - largest_C1).exp()
    total_C = e_CV.sum(1)
    mean_C = (e_CV * z_CV).sum(1) / total_C
    target_C = z_CV.gather(1, own_C.clamp(min=0)[:, None]).squeeze(1).where(own_C >= 0, 0.0)
    return target_C, mean_C, largest_C1.squeeze(1) + total_C.log()


def _combined(found_3N: Tensor, vocabulary: Vocabulary | None) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and logsumexp over all ranks of the vocabulary, from each row's statistics."""
    target_N, mean_N, lse_N = found_3N
    if vocabulary is not None:
        whole_N = vocabulary.logsumexp(lse_N)
        target_N, mean_N = vocabulary.sum(torch.stack([target_N, mean_N * (lse_N - whole_N).exp()])).unbind()
        lse_N = whole_N
    return target_N - lse_N, lse_N - mean_N, lse_N


def _gradient(scale: float, logits_CV: Tensor, own_C: Tensor, lse_C: Tensor, grad_logprobs_C: Tensor) -> None:
    """Replace the logits by the gradient that comes through the log-probabilities."""
    p_CV = (logits_CV.float() * scale - lse_C[:, None]).exp()
    logits_CV.copy_(grad_logprobs_C[:, None] * (_chosen(logits_CV, own_C) - p_CV) * scale)


def _gradient_with_entropy(
    scale: float,
    logits_CV: Tensor,
    own_C: Tensor,
    lse_C: Tensor,
    grad_logprobs_C: Tensor,
    entropy_C: Tensor,
    grad_entropy_C: Tensor,
) -> None:
    """Replace the logits by the gradient that comes through log-probabilities and entropies."""
    logp_CV = logits_CV.float() * scale - lse_C[:, None]
    p_CV = logp_CV.exp()
    grad_CV = grad_logprobs_C[:, None] * (_chosen(logits_CV, own_C) - p_CV)
    grad_CV = grad_CV - grad_entropy_C[:, None] * p_CV * (logp_CV + entropy_C[:, None])
    logits_CV.copy_(grad_CV * scale)


def _chosen(logits_CV: Tensor, own_C: Tensor) -> Tensor:
    """1 at the target, else 0."""
    return (torch.arange(logits_CV.shape[1], device=own_C.device)[None] == own_C[:, None]).float()


def _by_rows(function: Callable[..., Any], scale: float, *tensors: Tensor) -> Any:
    """Call the compiled ``function``. The number of rows changes from one micro-batch to the next, so the code is
    compiled once for all of them."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled(function)(scale, *tensors)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    tuned = function is not _statistics  # a sum's order, and so its last bits, must not depend on a measurement
    return torch.compile(function, options={"coordinate_descent_tuning": tuned})


def _fits(hidden_ND: Tensor, weight_VD: Tensor) -> bool:
    size = hidden_ND.shape[0] * weight_VD.shape[0] * hidden_ND.element_size()
    if not hidden_ND.is_cuda:
        return True
    return size <= torch.cuda.get_device_properties(hidden_ND.device).total_memory // _KEPT_SHARE


def _chunks(hidden_ND: Tensor, weight_VD: Tensor) -> list[slice]:
    size = max(_CHUNK // weight_VD.shape[0] // _ROWS * _ROWS, _ROWS)
    return [slice(start, start + size) for start in range(0, hidden_ND.shape[0], size)]


def _accumulate(total_VD: Tensor, grad_VC: Tensor, hidden_CD: Tensor) -> None:
    """``total += grad @ hidden`` in float32."""
    if grad_VC.dtype == torch.float32 or not grad_VC.is_cuda or torch.version.hip:  # ROCm has no such product
        total_VD.addmm_(grad_VC.float(), hidden_CD.float())
    else:
        torch.addmm(total_VD, grad_VC, hidden_CD, out_dtype=torch.float32, out=total_VD)
