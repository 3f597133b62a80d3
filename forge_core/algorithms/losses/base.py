"""What all policy losses share.

    L = agg( w * policy_gradient(l, a, A) + beta * KL(l, ref) - entropy_coef * H )

l: log-probability under the policy, with gradient. a: the anchor of the ratio ``r = exp(l - a)``: the log-probability
that the sampler stored, so off-policy batches are corrected for their age and for kernel differences alike. With a
``correction`` (see ``corrections.py``) the anchor is the proximal policy instead, and w the correction's weight.

Invariants:
- A loss file holds one formula: ``policy_gradient``. Masks, denominators, KL, entropy and metrics are here.
- Denominators are global (``Totals``): gradients do not depend on how a step is split into micro-batches or ranks.
- Computed in float32 or wider; masked positions contribute nothing, whatever they hold; no reading back from the
  device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge_core.algorithms.corrections import Correction
from forge_core.algorithms.metrics import is_maximum
from forge_core.algorithms.ops import (
    MAX_LOG_RATIO,
    AggregationType,
    KLType,
    Totals,
    aggregate,
    compute_entropy,
    compute_kl,
    compute_logprobs,
    widen,
)
from forge_core.data_model import TextTrainBatch

COMPUTED, WEIGHT, WEIGHT_SQUARED = "tokens/computed", "mismatch/weight", "mismatch/weight_squared"
CLIPPED, CLIPPED_HIGH, CLIPPED_LOW = "clip/fraction", "clip/high_fraction", "clip/low_fraction"
ONE_VERSION, ONE_VERSION_GAP = "mismatch/one_version", "mismatch/one_version_mean_abs_logprob"


@dataclass(frozen=True)
class Tokens:
    """One micro-batch as a loss sees it: all ``[B, T]``, float32 or wider, zero where masked. ``one_version`` is 0 in
    responses that several policy versions sampled."""

    logprobs: Tensor
    anchor: Tensor
    generator: Tensor
    advantages: Tensor
    mask: Tensor
    document_ids: Tensor | None
    one_version: Tensor


class Loss:
    """What a training step asks of any loss.

    ``needs_proximal``: the batch should carry ``proximal_logprobs``. ``mismatch_alarm``: warn when sampler and trainer
    differ by more than this on average (nats per token; None: never).
    """

    needs_proximal = False
    mismatch_alarm: float | None = None

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """An optimizer step's metrics, given those that were added up over its micro-batches."""
        return metrics

    def after_step(self, metrics: dict[str, float]) -> dict[str, float]:
        """Called after every optimizer step with its metrics: adapt; returns metrics to add to them."""
        return {}

    def state(self) -> dict[str, Any]:
        """What ``after_step`` adapts, JSON-able; it goes into checkpoints."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to a ``state``."""


class PolicyLoss(Loss):
    """``beta``: weight of the KL penalty (``kl_type``: see ``ops.compute_kl``). ``agg_type``: see ``ops.aggregate``.
    ``entropy_coef``: weight of the entropy bonus. ``correction``: see ``corrections.py``. ``penalises``: whether beta
    is the weight of a penalty."""

    penalises = True

    def __init__(
        self,
        beta: float,
        agg_type: AggregationType,
        entropy_coef: float = 0.0,
        *,
        kl_type: KLType = "k3",
        correction: Correction | None = None,
    ) -> None:
        self.beta, self.kl_type = beta, kl_type
        self.agg_type, self.entropy_coef, self.correction = agg_type, entropy_coef, correction
        self.needs_proximal = correction is not None

    def policy_gradient(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy-gradient term per position and metrics per position, all ``[B, T]``."""
        raise NotImplementedError

    def from_logprobs(
        self, logprobs_BT: Tensor, entropy_BT: Tensor, batch: TextTrainBatch, totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss share and metrics (which add up over micro-batches) of one micro-batch.

        ``logprobs_BT`` and ``entropy_BT`` belong to ``batch.target_ids`` at the sampling temperature.
        Raises ValueError when the batch lacks what the loss needs.
        """
        tokens = self.tokens(logprobs_BT, batch)
        loss_BT, per_token = self.policy_gradient(tokens)
        if self.correction is not None:
            weight_BT = self.correction.weights(tokens.anchor, tokens.generator, tokens.mask, tokens.document_ids)
            loss_BT, per_token["correction/weight"] = weight_BT * loss_BT, weight_BT
        kl_BT = self._kl(tokens, batch)
        if self.beta and self.penalises:
            loss_BT = loss_BT + self.beta * kl_BT
        if self.entropy_coef:
            loss_BT = loss_BT - self.entropy_coef * widen(entropy_BT)
        per_token |= {"entropy": entropy_BT, "kl": kl_BT}
        loss = aggregate(loss_BT, tokens.mask, totals, self.agg_type, tokens.document_ids)
        return loss, self._metrics(tokens, per_token, totals)

    def __call__(
        self,
        logits: Tensor,
        target_ids: Tensor,
        advantages: Tensor,
        generator_logprobs: Tensor,
        loss_mask: Tensor,
        ref_logprobs: Tensor | None = None,
        proximal_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a whole, unpacked batch: ``logits [B, T, V]`` (divided by the sampling temperature), the rest
        ``[B, T]`` (``advantages`` may be ``[B, 1]``).

        Denominators are those of this batch; the fixed horizon is T.
        """
        batch = TextTrainBatch(target_ids, target_ids, loss_mask, advantages.expand(loss_mask.shape))
        batch = dataclasses.replace(
            batch,
            generator_logprobs=generator_logprobs,
            ref_logprobs=ref_logprobs,
            proximal_logprobs=proximal_logprobs,
        )
        totals = Totals(int((loss_mask > 0).sum()), loss_mask.shape[0], loss_mask.shape[1])
        logprobs_BT, entropy_BT = compute_logprobs(logits, target_ids), compute_entropy(logits)
        return self.from_logprobs(logprobs_BT, entropy_BT, batch, totals)

    def tokens(self, logprobs_BT: Tensor, batch: TextTrainBatch) -> Tokens:
        name, mask_BT = type(self).__name__, batch.target_mask
        if batch.generator_logprobs is None:
            raise ValueError(f"{name} needs generator_logprobs: the sampler must return log-probabilities")
        if self.beta > 0 and batch.ref_logprobs is None:
            raise ValueError(f"{name} has beta={self.beta} but the batch has no ref_logprobs: set grpo.beta=0")

        def clean(x_BT: Tensor) -> Tensor:
            return torch.where(mask_BT > 0, widen(x_BT), 0.0)

        current_BT, generator_BT = clean(logprobs_BT), clean(batch.generator_logprobs)
        anchor_BT = generator_BT
        if self.needs_proximal:  # without its log-probabilities this step is the training step's first: o = l
            given = batch.proximal_logprobs
            anchor_BT = current_BT.detach() if given is None else clean(given)
        advantages_BT = clean(batch.target_weights)
        one_version_BT = torch.ones_like(current_BT) if batch.crossed is None else 1.0 - widen(batch.crossed)
        return Tokens(current_BT, anchor_BT, generator_BT, advantages_BT, mask_BT, batch.document_ids, one_version_BT)

    def _kl(self, tokens: Tokens, batch: TextTrainBatch) -> Tensor:
        if batch.ref_logprobs is None:
            return torch.zeros_like(tokens.logprobs)
        return compute_kl(tokens.logprobs, widen(batch.ref_logprobs), tokens.mask, self.kl_type)

    @torch.no_grad()
    def _metrics(self, tokens: Tokens, per_token: dict[str, Tensor], totals: Totals) -> dict[str, Tensor]:
        """Sums over tokens, as shares of the step's loss tokens, and how far the trainer is from the sampler.

        With g = trainer - sampler log-probability and w = exp(g): ``mismatch/k3`` is the mean of w - 1 - g, an
        estimate of KL(sampler || trainer). ``finish`` makes means of them.
        """
        trainer_BT = tokens.anchor if self.needs_proximal else tokens.logprobs
        gap_BT = trainer_BT - tokens.generator
        bounded_BT = gap_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        w_BT = bounded_BT.exp()
        if (clipped_BT := per_token.get(CLIPPED)) is not None:  # by the side on which the clip of PPO lies
            per_token[CLIPPED_HIGH] = clipped_BT & (tokens.advantages > 0)
            per_token[CLIPPED_LOW] = clipped_BT & (tokens.advantages < 0)
        per_token = per_token | {
            "mismatch/mean_abs_logprob": gap_BT.abs(),
            ONE_VERSION_GAP: gap_BT.abs() * tokens.one_version,
            ONE_VERSION: tokens.one_version,
            "mismatch/k3": w_BT - 1.0 - bounded_BT,
            COMPUTED: torch.ones_like(w_BT),
            WEIGHT: w_BT,
            WEIGHT_SQUARED: w_BT.square(),
        }
        metrics = {name: aggregate(widen(x), tokens.mask, totals, "token_mean") for name, x in per_token.items()}
        return metrics | {"mismatch/max_abs_logprob": gap_BT.abs().max()}

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Means over the tokens that were computed (those of groups without signal are not, though they count in the
        denominators; their share is what ``tokens/computed`` lacks to 1).

        ``mismatch/effective_samples`` is Kish's effective sample size of the sampler's tokens for the trainer's policy,
        as a share of the tokens: ``(sum w)^2 / (N sum w^2)``. ``mismatch/one_version_mean_abs_logprob`` leaves out
        responses whose log-probabilities come from several policies; where all do, there is none.
        """
        computed = metrics[COMPUTED]
        if not computed:
            return metrics
        means = {n: value if is_maximum(n) or n == COMPUTED else value / computed for n, value in metrics.items()}
        gap, share = means.pop(ONE_VERSION_GAP), means.pop(ONE_VERSION)
        means |= {"mismatch/effective_samples": means.pop(WEIGHT) ** 2 / means.pop(WEIGHT_SQUARED)}
        return means | ({ONE_VERSION_GAP: gap / share} if share else {})
