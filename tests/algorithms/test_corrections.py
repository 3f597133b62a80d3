"""Weights of the off-policy corrections, in closed form."""

from __future__ import annotations

import math

import pytest
import torch

from forge_core.algorithms.corrections import Correction, IcePop, SequenceMask, TruncatedIS
from forge_core.algorithms.losses import GRPOLoss
from tests.algorithms.batches import random_rows

RATIOS = torch.tensor([[2.0, 0.5, 4.0], [1.1, 0.9, 7.0]], dtype=torch.float64)
MASK = torch.tensor([[1.0, 1, 1], [1, 1, 0]])
GENERATOR = torch.full((2, 3), -1.0, dtype=torch.float64)
PROXIMAL = GENERATOR + RATIOS.log()
MEAN = (1.1 * 0.9) ** 0.5


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (TruncatedIS("token", 0.0, 2.0), [[2.0, 0.5, 2.0], [1.1, 0.9, 0.0]]),
        (TruncatedIS("token", 0.95, 3.0), [[2.0, 0.95, 3.0], [1.1, 0.95, 0.0]]),
        (TruncatedIS("sequence", 0.0, 3.5), [[3.5, 3.5, 3.5], [0.99, 0.99, 0.0]]),
        (IcePop(0.6, 3.0), [[2.0, 0.0, 0.0], [1.1, 0.9, 0.0]]),
        (SequenceMask(0.9, 1.1), [[0.0, 0.0, 0.0], [1.1, 0.9, 0.0]]),
        (SequenceMask(0.9, 1.1, "geometric"), [[0.0, 0.0, 0.0], [MEAN, MEAN, 0.0]]),
    ],
)
def test_weights(correction: Correction, expected: list) -> None:
    found = correction.weights(PROXIMAL, GENERATOR, MASK)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    packed = correction.weights(
        PROXIMAL.view(1, 6), GENERATOR.view(1, 6), MASK.view(1, 6), torch.tensor([[4, 4, 4, 2, 2, 2]])
    )
    torch.testing.assert_close(packed.view(2, 3), found)


@pytest.mark.parametrize(
    "correction", [TruncatedIS("sequence", high=math.inf), IcePop(0, math.inf), SequenceMask(0, math.inf)]
)
def test_weights_are_finite_for_policies_that_have_nothing_in_common(correction: Correction) -> None:
    found = correction.weights(torch.full((1, 50), -0.1), torch.full((1, 50), -90.0), torch.ones(1, 50))
    assert torch.isfinite(found).all()


def test_the_ratio_is_against_the_proximal_policy_and_the_weight_against_the_sampler() -> None:
    rows = random_rows()
    loss_fn = GRPOLoss(10.0, 10.0, beta=0.0, agg_type="token_mean", correction=TruncatedIS("token", high=1.05))
    loss, _ = loss_fn.from_logprobs(rows.logprobs, rows.entropy, rows.batch(), rows.totals)
    weight = (rows.proximal - rows.generator).exp().clamp(max=1.05)
    ratio = (rows.logprobs - rows.proximal).exp()
    expected = -(weight * ratio * rows.advantages * rows.mask).sum() / rows.mask.sum()
    assert loss.item() == pytest.approx(expected.item())


def test_without_proximal_log_probabilities_the_step_is_its_own_proximal_policy() -> None:
    rows = random_rows()
    batch = rows.batch()
    loss_fn = GRPOLoss(beta=0.0, correction=TruncatedIS("token", high=1.5))
    batch.proximal_logprobs = None
    alone, _ = loss_fn.from_logprobs(rows.logprobs, rows.entropy, batch, rows.totals)
    batch.proximal_logprobs = rows.logprobs.detach().clone()
    given, _ = loss_fn.from_logprobs(rows.logprobs, rows.entropy, batch, rows.totals)
    assert alone.item() == given.item()


def test_the_penalty_is_not_weighted_and_what_is_left_out_stays_in_the_denominator() -> None:
    rows = random_rows()
    nothing = GRPOLoss(beta=0.3, agg_type="token_mean", correction=IcePop(100.0, 200.0))
    only_penalty, metrics = nothing.from_logprobs(rows.logprobs, rows.entropy, rows.batch(), rows.totals)
    d = (rows.ref - rows.logprobs) * rows.mask
    expected = 0.3 * (d.exp() - d - 1).sum() / rows.mask.sum()
    assert only_penalty.item() == pytest.approx(expected.item())
    assert metrics["correction/weight"].item() == 0.0
