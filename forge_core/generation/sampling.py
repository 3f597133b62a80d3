"""Drawing tokens for many rows at once, each row with its own settings and its own random numbers.

Guarantees:
- Row ``r`` draws by inverse CDF from the uniform number that is handed in for it, so what shares its batch cannot
  change its random numbers. Uniforms come from one ``torch.Generator`` per request, never the global one.
- Without truncation the log-probability is ``log_softmax(logits / temperature)`` in float32 (temperature 0: greedy
  choice, log-probability at temperature 1). With truncation it is that of the renormalised, truncated distribution.
- Truncation follows vLLM's order: min_p on the full distribution, then top_k, then top_p of what top_k left
  renormalised (nucleus: https://arxiv.org/abs/1904.09751; min-p: https://arxiv.org/abs/2407.01082).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forge_core.data_model import GenerationRequest, SamplingParams

# Keeps u * total below the total under rounding, so that a token of probability 0 is never drawn.
_LARGEST_UNIFORM = 1 - 2**-50


@dataclass(frozen=True)
class RowSampling:
    """Sampling settings of ``R`` rows; tensors are ``[R]``. ``temperature`` is 1 where ``greedy``."""

    temperature: Tensor
    greedy: Tensor
    truncated: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    any_greedy: bool
    any_drawn: bool
    any_truncated: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> RowSampling:
        greedy = [p.temperature == 0 for p in params]
        truncated = [is_truncated(p) for p in params]
        return cls(
            temperature=torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32, device=device),
            greedy=torch.tensor(greedy, device=device),
            truncated=torch.tensor(truncated, device=device),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
            top_k=torch.tensor([p.top_k for p in params], device=device),
            min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
            any_greedy=any(greedy),
            any_drawn=not all(greedy),
            any_truncated=any(truncated),
        )

    def select(self, rows: Tensor) -> RowSampling:
        """The settings of some rows (``any_*`` may stay true for rows that left)."""
        tensors: dict[str, Any] = {k: v[rows] for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)


def is_truncated(params: SamplingParams) -> bool:
    """Whether truncation changes how tokens are drawn (a greedy choice is the same with it)."""
    return params.truncated and params.temperature > 0


def draw_uniforms(requests: Sequence[GenerationRequest]) -> Tensor:
    """Float64 ``[N, T]`` in [0, 1) on the CPU: row n is the stream of request n's seed, ``T`` the largest limit."""
    steps = max(r.sampling.max_new_tokens for r in requests)
    uniforms = torch.zeros(len(requests), steps, dtype=torch.float64)
    generator = torch.Generator()
    for row, request in zip(uniforms.unbind(), requests, strict=True):
        if request.sampling.temperature > 0:
            row.uniform_(generator=generator.manual_seed(request.seed))
    return uniforms.clamp_(max=_LARGEST_UNIFORM)


def sample(logits_RV: Tensor, rows: RowSampling, uniforms_R: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability (float32), both ``[R]``."""
    logits_RV = logits_RV.float()
    logprobs_RV = torch.log_softmax(logits_RV / rows.temperature[:, None], dim=-1)
    if rows.any_truncated:
        logprobs_RV[rows.truncated] = _truncate(logprobs_RV[rows.truncated], rows.select(rows.truncated))
    if not rows.any_drawn:
        tokens_R = logits_RV.argmax(-1)
    else:
        tokens_R = _inverse_cdf(logprobs_RV, uniforms_R)
        if rows.any_greedy:
            tokens_R = torch.where(rows.greedy, logits_RV.argmax(-1), tokens_R)
    return tokens_R, logprobs_RV.gather(1, tokens_R[:, None]).squeeze(1)


def _inverse_cdf(logprobs_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the row's uniform number."""
    cdf_RV = logprobs_RV.exp().cumsum(-1, dtype=torch.float64)
    tokens_R = torch.searchsorted(cdf_RV, (uniforms_R * cdf_RV[:, -1])[:, None], right=True).squeeze(1)
    # Only logits that are not finite reach the bound; the caller sees it in the log-probability.
    return tokens_R.clamp_(max=logprobs_RV.shape[1] - 1)


def _truncate(logprobs_RV: Tensor, rows: RowSampling) -> Tensor:
    """Log-probabilities after min_p, top_k and top_p, renormalised; -inf where a token cannot be drawn."""
    sorted_RV, order_RV = logprobs_RV.sort(dim=-1, descending=True, stable=True)
    floor_R = sorted_RV[:, 0] + rows.min_p.log()  # log 0 = -inf: no floor
    top_k_R = torch.where(rows.top_k > 0, rows.top_k, logprobs_RV.shape[1])
    rank_V = torch.arange(logprobs_RV.shape[1], device=logprobs_RV.device)
    dropped_RV = (sorted_RV < floor_R[:, None]) | (rank_V >= top_k_R[:, None])
    kept_RV = torch.log_softmax(sorted_RV.masked_fill(dropped_RV, -torch.inf), dim=-1)
    probs_RV = kept_RV.exp()
    # A token stays while the mass before it is below top_p, so the likeliest always stays. At top_p 1 nothing may go.
    mass_before_RV = probs_RV.cumsum(-1, dtype=torch.float64) - probs_RV
    outside_RV = (mass_before_RV >= rows.top_p[:, None]) & (rows.top_p < 1)[:, None]
    kept_RV = torch.log_softmax(kept_RV.masked_fill(outside_RV, -torch.inf), dim=-1)
    return torch.empty_like(kept_RV).scatter_(1, order_RV, kept_RV)
