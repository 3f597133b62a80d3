"""Building blocks and the GRPO loss against closed forms and torchforge's golden values."""

from __future__ import annotations

import math

import pytest
import torch

from forge_core.algorithms.losses import GRPOLoss
from forge_core.algorithms.ops import (
    Totals,
    aggregate,
    compute_entropy,
    compute_kl,
    compute_logprobs,
    compute_ratio,
    create_shifted_targets,
)
from forge_core.data_model import TextTrainBatch


@pytest.fixture
def golden() -> dict[str, torch.Tensor]:
    """Inputs of the golden values: drawn in this order after seed 42."""
    generator = torch.Generator().manual_seed(42)
    logits = torch.randn(2, 4, 10, generator=generator)
    targets = torch.randint(0, 10, (2, 4), generator=generator)
    ref = torch.randn(2, 4, generator=generator) * 0.5 - 2
    advantages = torch.randn(2, 4, generator=generator)
    return {
        "logits": logits.requires_grad_(),
        "targets": targets,
        "generator": torch.tensor([[-2, -2.1, -1.9, -2], [-6, -1, -5, -0.5]]),
        "ref": ref,
        "advantages": advantages,
        "mask": torch.tensor([[1.0, 0, 1, 0], [1, 1, 0, 0]]),
    }


@pytest.mark.parametrize(("high", "loss"), [(0.2, 0.260804), (0.28, 0.259753)])
def test_grpo_loss_and_gradient_match_the_golden_values(golden: dict, high: float, loss: float) -> None:
    g = golden
    fn = GRPOLoss(clip_low=0.2, clip_high=high, beta=0.1, agg_type="fixed_horizon")
    value, _ = fn(g["logits"], g["targets"], g["advantages"], g["generator"], g["mask"], g["ref"])
    value.backward()
    assert value.item() == pytest.approx(loss, abs=1e-5)
    assert g["logits"].grad.norm().item() == pytest.approx(0.137857, abs=1e-5)


def test_logprobs_entropy_kl_and_aggregates_match_the_golden_values(golden: dict) -> None:
    g, mask = golden, golden["mask"]
    logprobs = compute_logprobs(g["logits"], g["targets"])
    expected = [[-2.455715, -3.950112, -2.637205, -3.512223], [-3.542688, -2.388949, -3.638923, -4.686581]]
    torch.testing.assert_close(logprobs, torch.tensor(expected), atol=1e-5, rtol=0)
    assert float((compute_entropy(g["logits"]) * mask).sum() / mask.sum()) == pytest.approx(1.851785, abs=1e-5)
    k3 = compute_kl(logprobs, g["ref"], mask)
    assert float(k3.sum() / mask.sum()) == pytest.approx(0.740411, abs=1e-5)
    ratio = compute_ratio(logprobs, g["generator"], mask)
    totals = Totals(4, 2, 4)
    for agg_type, value in (("token_mean", 3.258794), ("fixed_horizon", 1.629397), ("sequence_mean", 3.258794)):
        assert float(aggregate(ratio, mask, totals, agg_type)) == pytest.approx(value, abs=1e-5)


def test_shifted_targets_use_the_mask_of_the_predicting_position() -> None:
    ids = torch.tensor([[10, 20, 30, 40], [50, 60, 70, 80]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    assert create_shifted_targets(ids, mask).tolist() == [[20, 30, -100, -100], [60, 70, 80, -100]]
    assert create_shifted_targets(ids).tolist() == [[20, 30, 40, -100], [60, 70, 80, -100]]


def test_entropy_of_a_distribution_with_impossible_tokens_is_finite() -> None:
    logits = torch.tensor([[[0.0, 0.0, -math.inf]]])
    assert float(compute_entropy(logits)) == pytest.approx(math.log(2))


def test_extreme_ratios_stay_finite_in_value_and_gradient() -> None:
    logprobs = torch.tensor([[-60.0, -0.1]], requires_grad=True)
    batch = rl_batch(torch.tensor([[-0.1, -60.0]]), torch.tensor([[-1.0, -1.0]]))
    loss, _ = GRPOLoss(beta=0.1).from_logprobs(logprobs, torch.zeros(1, 2), batch, Totals(2, 1, 2))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()


def rl_batch(generator: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor | None = None) -> TextTrainBatch:
    ids = torch.zeros(generator.shape, dtype=torch.long)
    mask = torch.ones_like(generator) if mask is None else mask
    return TextTrainBatch(ids, ids, mask, advantages, generator, generator.clone())


def test_an_all_masked_batch_gives_a_finite_zero_loss_and_gradient() -> None:
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    batch = rl_batch(torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2), torch.zeros(1, 2))
    loss, metrics = GRPOLoss().from_logprobs(logprobs, torch.ones(1, 2), batch, Totals(0, 0, 2))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert logprobs.grad.abs().max() == 0
    assert all(torch.isfinite(m) for m in metrics.values())


@pytest.mark.parametrize("agg_type", ["token_mean", "sequence_mean", "fixed_horizon"])
def test_any_split_into_micro_batches_gives_the_same_gradient(agg_type: str) -> None:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(6, 5, generator=generator)
    logprobs = (old + 0.2 * torch.randn(6, 5, generator=generator)).requires_grad_()
    advantages = torch.randn(6, 5, generator=generator)
    mask = (torch.rand(6, 5, generator=generator) > 0.3).float()
    totals = Totals(int(mask.sum()), 6, 5)
    loss_fn = GRPOLoss(beta=0.2, agg_type=agg_type, entropy_coef=0.01)

    def gradient(splits: list[slice]) -> torch.Tensor:
        logprobs.grad = None
        for rows in splits:
            batch = rl_batch(old[rows], advantages[rows], mask[rows])
            loss, _ = loss_fn.from_logprobs(logprobs[rows], -logprobs[rows], batch, totals)
            loss.backward()
        return logprobs.grad.clone()

    whole = gradient([slice(0, 6)])
    torch.testing.assert_close(gradient([slice(0, 1), slice(1, 4), slice(4, 6)]), whole)
    torch.testing.assert_close(gradient([slice(i, i + 1) for i in range(6)]), whole)


def test_sequence_mean_of_packed_documents_equals_that_of_rows() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    rows = aggregate(values, mask, Totals(4, 2), "sequence_mean")
    packed = aggregate(
        torch.tensor([[1.0, 2, 3, 4, 9]]),
        torch.tensor([[1.0, 1, 1, 1, 0]]),
        Totals(4, 2),
        "sequence_mean",
        torch.tensor([[0, 0, 0, 1, -1]]),
    )
    assert float(rows) == float(packed) == 3.0


def test_a_loss_without_what_it_needs_says_so() -> None:
    ids = torch.zeros(1, 2, dtype=torch.long)
    batch = TextTrainBatch(ids, ids, torch.ones(1, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="generator_logprobs"):
        GRPOLoss().from_logprobs(torch.zeros(1, 2), torch.zeros(1, 2), batch, Totals(2, 1))
    batch.generator_logprobs = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"grpo\.beta=0"):
        GRPOLoss(beta=0.1).from_logprobs(torch.zeros(1, 2), torch.zeros(1, 2), batch, Totals(2, 1))
