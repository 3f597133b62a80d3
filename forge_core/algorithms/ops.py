"""Building blocks of policy losses.

Invariants:
- Every function works on ``[B, T]`` (or ``[B, T, V]``) tensors in float32 or wider and never divides by a local count:
  denominators are global (``Totals``), so any split into micro-batches or ranks gives the same gradient.
- Positions with mask 0 contribute exactly zero to values and gradients.
- Temperature divides logits before log-softmax; it never divides log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

AggregationType = Literal["token_mean", "sequence_mean", "fixed_horizon"]
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


def compute_logprobs(logits_BTV: Tensor, target_ids_BT: Tensor) -> Tensor:
    """``log_softmax(logits)`` at the targets, ``[B, T]`` float32; targets below 0 give 0."""
    valid_BT = target_ids_BT >= 0
    logprobs_BTV = torch.log_softmax(logits_BTV.float(), dim=-1)
    gathered_BT = logprobs_BTV.gather(-1, target_ids_BT.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(valid_BT, gathered_BT, 0.0)


def compute_entropy(logits_BTV: Tensor) -> Tensor:
    """Entropy of the softmax in nats, ``[B, T]``; a logit of minus infinity contributes its limit, zero."""
    logprobs_BTV = torch.log_softmax(logits_BTV.float(), dim=-1)
    terms_BTV = logprobs_BTV.exp() * logprobs_BTV
    return -torch.where(torch.isneginf(logprobs_BTV), 0.0, terms_BTV).sum(-1)


def compute_ratio(logprobs_BT: Tensor, generator_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Importance ratio ``exp(l - b)`` per token, 1 where masked; the log-ratio is clamped to +-20."""
    log_ratio_BT = (logprobs_BT - generator_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(mask_BT.bool(), log_ratio_BT, 0.0).exp()


def compute_kl(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """k3 estimator of KL(policy || reference) per token: ``exp(d) - d - 1`` with ``d = ref - policy``.

    Source: J. Schulman, "Approximating KL divergence" (2020). Zero where masked; ``d`` is clamped to +-20.
    """
    d_BT = (ref_logprobs_BT - logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    d_BT = torch.where(mask_BT.bool(), d_BT, 0.0)
    return d_BT.exp() - d_BT - 1.0


def aggregate(
    values_BT: Tensor, mask_BT: Tensor, totals: Totals, agg_type: AggregationType, document_ids_BT: Tensor | None = None
) -> Tensor:
    """This micro-batch's share of the step's aggregate, a scalar.

    token_mean: ``sum(m x) / tokens``. sequence_mean: mean over sequences of the mean over their tokens; a sequence
    is a document of a packed batch, or a row when ``document_ids_BT`` is None. fixed_horizon (Dr. GRPO,
    arXiv 2503.20783): ``sum(m x) / (sequences * horizon)``.
    """
    mask_BT = mask_BT.to(values_BT.dtype)
    masked_BT = torch.where(mask_BT > 0, values_BT * mask_BT, 0.0)
    if agg_type == "token_mean":
        return masked_BT.sum() / max(totals.tokens, 1)
    if agg_type == "fixed_horizon":
        return masked_BT.sum() / (max(totals.sequences, 1) * totals.horizon)
    return _sequence_sums(masked_BT, mask_BT, document_ids_BT).sum() / max(totals.sequences, 1)


def _sequence_sums(masked_BT: Tensor, mask_BT: Tensor, document_ids_BT: Tensor | None) -> Tensor:
    """Mean over each sequence's tokens, one entry a sequence (0 for a sequence without tokens)."""
    if document_ids_BT is None:
        return masked_BT.sum(-1) / mask_BT.sum(-1).clamp(min=1.0)
    _, index = torch.unique(document_ids_BT, return_inverse=True)
    zeros = masked_BT.new_zeros(int(index.max()) + 1)
    sums = zeros.index_add(0, index.flatten(), masked_BT.flatten())
    counts = zeros.index_add(0, index.flatten(), mask_BT.flatten())
    return sums / counts.clamp(min=1.0)


def create_shifted_targets(input_ids_BT: Tensor, loss_mask_BT: Tensor | None = None, ignore: int = -100) -> Tensor:
    """Next-token targets, ``[B, T]``: position t predicts ``input_ids[t + 1]``; the last position and positions
    whose own mask is 0 are ``ignore``."""
    targets_BT = torch.full_like(input_ids_BT, ignore)
    targets_BT[:, :-1] = input_ids_BT[:, 1:]
    return targets_BT if loss_mask_BT is None else targets_BT.masked_fill(loss_mask_BT == 0, ignore)
