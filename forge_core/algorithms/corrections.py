"""Corrections for a sampler that is not the policy being trained: weights on the policy-gradient term.

With a correction the loss is *decoupled* (AReaL, arXiv 2505.24298): ratio and clip are taken against the proximal
policy o, the trainer's own policy at the start of the training step, and each token's term is multiplied by a weight
made of ``w = exp(o - b)``, where b is the log-probability that the sampler stored. So the trust region does not see
the gap between sampler and trainer (older version, other kernels), and the weight corrects for it.

Invariants:
- Weights carry no gradient, are finite, and 0 where masked; KL penalty and entropy bonus are not weighted.
- A token or sequence that a correction leaves out keeps its place in the denominators.
- Log-ratios are clamped to +-20 before they are exponentiated; a product or mean is clamped after it is taken.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from forge_core.algorithms.ops import MAX_LOG_RATIO, sequence_mean, sequence_sum


class Correction(Protocol):
    """What a loss asks of a correction. Tensors are ``[B, T]``: log-probabilities of the proximal policy and of the
    sampler, and the loss mask. ``document_ids_BT``: which packed document a position is of; None: a row is one."""

    def weights(
        self, proximal_BT: Tensor, generator_BT: Tensor, mask_BT: Tensor, document_ids_BT: Tensor | None = None
    ) -> Tensor:
        """Weight of each position's policy-gradient term, ``[B, T]``."""
        ...


def _log_ratio(proximal_BT: Tensor, generator_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return torch.where(mask_BT > 0, proximal_BT.detach() - generator_BT, 0.0)


def _weight(log_ratio_BT: Tensor) -> Tensor:
    return log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


class TruncatedIS:
    """Truncated importance sampling: ``clamp(w, low, high)``; w of a token, or the product over its sequence.

    Source: "Your efficient RL framework secretly brings you off-policy RL training" (2025). Truncation trades bias for
    variance; the product over a sequence is unbiased but explodes with its length, so it is nearly always truncated.
    """

    def __init__(self, level: Literal["token", "sequence"] = "token", low: float = 0.0, high: float = 2.0) -> None:
        self.level, self.low, self.high = level, low, high

    def weights(
        self, proximal_BT: Tensor, generator_BT: Tensor, mask_BT: Tensor, document_ids_BT: Tensor | None = None
    ) -> Tensor:
        log_w_BT = _log_ratio(proximal_BT, generator_BT, mask_BT)
        if self.level == "sequence":
            log_w_BT = sequence_sum(log_w_BT, mask_BT, document_ids_BT)
        return torch.where(mask_BT > 0, _weight(log_w_BT).clamp(self.low, self.high), 0.0)


class IcePop:
    """``w`` where ``low <= w <= high``, else 0: tokens on which sampler and trainer disagree are left out.

    Source: IcePop, in "Every Step Evolves" (arXiv 2510.18855), with the defaults 0.5 and 5.
    """

    def __init__(self, low: float = 0.5, high: float = 5.0) -> None:
        self.low, self.high = low, high

    def weights(
        self, proximal_BT: Tensor, generator_BT: Tensor, mask_BT: Tensor, document_ids_BT: Tensor | None = None
    ) -> Tensor:
        w_BT = _weight(_log_ratio(proximal_BT, generator_BT, mask_BT))
        return torch.where((mask_BT > 0) & (w_BT >= self.low) & (w_BT <= self.high), w_BT, 0.0)


class SequenceMask:
    """Leaves out whole sequences whose geometric-mean ratio lies outside ``[low, high]``.

    ``weight``: of the tokens of the others: ``token``, their own w (not truncated), or ``geometric``, the sequence's
    geometric mean. The first is OpenRLHF's ``seq-mask-tis``, the second AReaL's sequence-level mask.
    """

    def __init__(self, low: float = 0.99, high: float = 1.01, weight: Literal["token", "geometric"] = "token") -> None:
        self.low, self.high, self.weight = low, high, weight

    def weights(
        self, proximal_BT: Tensor, generator_BT: Tensor, mask_BT: Tensor, document_ids_BT: Tensor | None = None
    ) -> Tensor:
        log_w_BT = _log_ratio(proximal_BT, generator_BT, mask_BT)
        mean_BT = _weight(sequence_mean(log_w_BT, mask_BT, document_ids_BT))
        kept_BT = (mask_BT > 0) & (mean_BT >= self.low) & (mean_BT <= self.high)
        return torch.where(kept_BT, mean_BT if self.weight == "geometric" else _weight(log_w_BT), 0.0)
