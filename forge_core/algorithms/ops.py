"""Building blocks of policy losses.

Invariants:
- Every function works on ``[B, T]`` (or ``[B, T, V]``) tensors in float32 or wider and never divides by a local count:
  denominators are global (``Totals``), so any split into micro-batches or ranks gives the same gradient.
- Positions with mask 0 contribute exactly zero to values and gradients, whatever they hold.
- Temperature divides logits before log-softmax; it never divides log-probabilities.
- Nothing waits for the device: sequences of a packed batch are found without reading a tensor back.

A *sequence* is a document of a packed batch (positions with one number in ``document_ids``, which lie side by side and
never span micro-batches), or a row when there are no ``document_ids``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from forge_core.training.logprob_head import target_logprobs

AggregationType = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_horizon"]
RatioType = Literal["token", "sequence"]
KLType = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]
MAX_LOG_RATIO = 20.0  # exp(20) is finite in every dtype in use; larger log-ratios carry no usable signal


@dataclass(frozen=True)
class Totals:
    """Denominators of one optimizer step, over all its micro-batches and ranks.

    ``tokens`` counts loss tokens, ``sequences`` counts episodes, ``horizon`` is the length that fixed-horizon
    aggregation divides by (the longest response allowed).
    """

    tokens: int
    sequences: int
    horizon: int = 1


def widen(x: Tensor) -> Tensor:
    """``x`` in float32, or in float64 where it is float64 already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def compute_logprobs(logits_BTV: Tensor, target_ids_BT: Tensor, temperature: float = 1.0) -> Tensor:
    """``log_softmax(logits / temperature)`` at the targets, ``[B, T]`` in float32 or wider; targets below 0 give 0."""
    valid_BT = target_ids_BT >= 0
    logprobs_BTV = torch.log_softmax(widen(logits_BTV) / temperature, dim=-1)
    gathered_BT = logprobs_BTV.gather(-1, target_ids_BT.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(valid_BT, gathered_BT, 0.0)


def compute_logprobs_from_hidden(
    hidden_BTD: Tensor, weight_VD: Tensor, target_ids_BT: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, each ``[B, T]`` float32, from hidden states and the output matrix.

    The ``[B, T, V]`` logits never exist: they are computed chunk by chunk, in the backward pass too
    (see ``training/logprob_head.py`` for the bound on memory). Targets below 0 give 0 and no gradient.
    """
    valid_BT = target_ids_BT >= 0
    flat_ND, target_N = hidden_BTD.flatten(0, 1), target_ids_BT.clamp(min=0).flatten()
    found = target_logprobs(flat_ND, weight_VD, target_N, temperature)
    logprobs_BT, entropy_BT = (torch.where(valid_BT, x_N.view_as(target_ids_BT), 0.0) for x_N in found)
    return logprobs_BT, entropy_BT


def compute_entropy(logits_BTV: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy of the softmax in nats, ``[B, T]``; a logit of minus infinity contributes its limit, zero."""
    logprobs_BTV = torch.log_softmax(widen(logits_BTV) / temperature, dim=-1)
    finite_BTV = logprobs_BTV.masked_fill(torch.isneginf(logprobs_BTV), 0.0)  # keeps 0 x inf out of the gradient too
    return -(logprobs_BTV.exp() * finite_BTV).sum(-1)


def compute_ratio(
    logprobs_BT: Tensor,
    generator_logprobs_BT: Tensor,
    mask_BT: Tensor,
    ratio_type: RatioType = "token",
    document_ids_BT: Tensor | None = None,
) -> Tensor:
    """Importance ratio per position, 1 where masked; log-ratios are clamped to +-20.

    token: ``exp(l - b)``. sequence: the geometric mean of its tokens' ratios, the same at each of its positions, with
    the gradient of each position's own log-probability (GSPO-token, arXiv 2507.18071):
    ``exp(sg(mean(l - b)) + l - sg(l))``.
    """
    log_ratio_BT = torch.where(mask_BT > 0, logprobs_BT - generator_logprobs_BT, 0.0)
    if ratio_type == "sequence":
        own_BT = log_ratio_BT - log_ratio_BT.detach()
        log_ratio_BT = torch.where(mask_BT > 0, sequence_mean(log_ratio_BT.detach(), mask_BT, document_ids_BT), 0.0)
        return (log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + own_BT).exp()
    return log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def compute_kl(
    logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    mask_BT: Tensor,
    kl_type: KLType = "k3",
    max_abs: float | None = None,
) -> Tensor:
    """Estimate of KL(policy || reference) per token, from one sample; zero where masked. ``d = ref - policy``.

    k1 ``-d`` (unbiased, high variance; its gradient has mean zero, so it is no penalty in a loss), abs ``|d|``,
    k2 ``d^2 / 2`` (its gradient is that of the KL), k3 ``exp(d) - d - 1`` (unbiased, never negative; ``d`` clamped to
    +-20). k1+ and k3+: the value of k1 or k3 with the gradient of k2. ``max_abs``: clamp the estimate to +-``max_abs``
    (10 is usual elsewhere); there its gradient is 0.
    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    d_BT = torch.where(mask_BT > 0, ref_logprobs_BT - logprobs_BT, 0.0)
    value_BT = _kl_value(d_BT, kl_type.removesuffix("+"))
    if max_abs is not None:
        value_BT = value_BT.clamp(-max_abs, max_abs)
    if not kl_type.endswith("+"):
        return value_BT
    slope_BT = _kl_value(d_BT, "k2")
    return slope_BT - slope_BT.detach() + value_BT.detach()


def _kl_value(d_BT: Tensor, kl_type: str) -> Tensor:
    if kl_type == "k1":
        return -d_BT
    if kl_type == "abs":
        return d_BT.abs()
    if kl_type == "k2":
        return 0.5 * d_BT.square()
    d_BT = d_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d_BT.exp() - d_BT - 1.0


def aggregate(
    values_BT: Tensor, mask_BT: Tensor, totals: Totals, agg_type: AggregationType, document_ids_BT: Tensor | None = None
) -> Tensor:
    """This micro-batch's share of the step's aggregate, a scalar.

    token_mean: ``sum(m x) / tokens``. sequence_mean: mean over sequences of the mean over their tokens.
    sequence_sum: mean over sequences of the sum over their tokens. fixed_horizon (Dr. GRPO, arXiv 2503.20783):
    ``sum(m x) / (sequences * horizon)``.
    """
    mask_BT = mask_BT.to(values_BT.dtype)
    masked_BT = torch.where(mask_BT > 0, values_BT * mask_BT, 0.0)
    if agg_type == "token_mean":
        return masked_BT.sum() / max(totals.tokens, 1)
    if agg_type == "sequence_mean":
        masked_BT = masked_BT / sequence_sum(mask_BT, mask_BT, document_ids_BT).clamp(min=1.0)
    length = totals.horizon if agg_type == "fixed_horizon" else 1
    return masked_BT.sum() / (max(totals.sequences, 1) * length)


def sequence_sum(values_BT: Tensor, mask_BT: Tensor, document_ids_BT: Tensor | None = None) -> Tensor:
    """Sum of each sequence's masked-in values, at each of its positions (``[B, T]``)."""
    masked_BT = torch.where(mask_BT > 0, values_BT, 0.0)
    if document_ids_BT is None:
        return masked_BT.sum(-1, keepdim=True).expand_as(masked_BT)
    ids_N = document_ids_BT.flatten()
    starts_N = torch.cat([ids_N.new_zeros(1, dtype=torch.bool), ids_N[1:] != ids_N[:-1]])
    index_N = starts_N.cumsum(0)  # documents lie side by side, so a change of number begins the next one
    sums_N = masked_BT.new_zeros(ids_N.numel()).index_add(0, index_N, masked_BT.flatten())
    return sums_N[index_N].view_as(masked_BT)


def sequence_mean(values_BT: Tensor, mask_BT: Tensor, document_ids_BT: Tensor | None = None) -> Tensor:
    """Mean of each sequence's masked-in values, at each of its positions; 0 for a sequence without any."""
    counts_BT = sequence_sum((mask_BT > 0).to(values_BT.dtype), mask_BT, document_ids_BT)
    return sequence_sum(values_BT, mask_BT, document_ids_BT) / counts_BT.clamp(min=1.0)


def create_shifted_targets(input_ids_BT: Tensor, loss_mask_BT: Tensor | None = None, ignore: int = -100) -> Tensor:
    """Next-token targets, ``[B, T]``: position t predicts ``input_ids[t + 1]``; the last position and positions
    whose own mask is 0 are ``ignore``."""
    targets_BT = torch.full_like(input_ids_BT, ignore)
    targets_BT[:, :-1] = input_ids_BT[:, 1:]
    return targets_BT if loss_mask_BT is None else targets_BT.masked_fill(loss_mask_BT == 0, ignore)
