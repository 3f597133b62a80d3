"""What holds for every policy loss: any split, any packing, nothing to train on, extreme numbers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from forge_core.algorithms.losses import DAPOLoss, GRPOLoss, GSPOLoss, PolicyLoss, ReinforceLoss
from forge_core.algorithms.losses.base import ONE_VERSION_GAP
from forge_core.algorithms.metrics import accumulate
from forge_core.algorithms.ops import Totals, compute_logprobs
from forge_core.data_model import TextTrainBatch
from tests.algorithms.batches import EVERY_LOSS, Rows, evaluate, packed, random_rows

every_loss = pytest.mark.parametrize("loss_fn", [make() for make in EVERY_LOSS.values()], ids=list(EVERY_LOSS))
TINY = 1e-12


@every_loss
@pytest.mark.parametrize("sizes", [[1, 3, 2], [1] * 6, [4, 2]])
def test_any_split_into_micro_batches_gives_the_same_loss_gradient_and_metrics(
    loss_fn: PolicyLoss, sizes: list[int]
) -> None:
    rows = random_rows()
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    whole = evaluate(loss_fn, rows, [slice(0, 6)])
    split = evaluate(loss_fn, rows, [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)])
    assert split[0] == pytest.approx(whole[0], abs=TINY)
    torch.testing.assert_close(split[1], whole[1], rtol=0, atol=TINY)
    assert split[2] == pytest.approx(whole[2], abs=1e-7)


@every_loss
def test_ranks_that_sum_their_gradients_take_the_step_of_one_rank(loss_fn: PolicyLoss) -> None:
    """Two ranks with unequal shares, each with the step's global denominators and its own copy of the parameters."""
    rows = random_rows()
    _, whole, _ = evaluate(loss_fn, rows, [slice(0, 6)])
    ranks = [evaluate(loss_fn, rows, [part]) for part in (slice(0, 1), slice(1, 6))]
    torch.testing.assert_close(ranks[0][1] + ranks[1][1], whole, rtol=0, atol=TINY)


@every_loss
def test_packing_documents_beside_each_other_changes_nothing(loss_fn: PolicyLoss) -> None:
    rows = random_rows()
    expected, gradient, _ = evaluate(loss_fn, rows, [slice(0, 6)])
    for orders in ([[3, 0, 5, 1, 4, 2]], [[5, 2], [0, 1, 4], [3]]):
        rows.logprobs.grad, total = None, 0.0
        for order in orders:
            logprobs, entropy, batch = packed(rows, order)
            loss, _ = loss_fn.from_logprobs(logprobs, entropy, batch, rows.totals)
            loss.backward()
            total += loss.item()
        assert total == pytest.approx(expected, abs=1e-6)
        torch.testing.assert_close(rows.logprobs.grad, gradient, rtol=0, atol=1e-6)


@every_loss
def test_padding_rows_and_what_masked_positions_hold_change_nothing(loss_fn: PolicyLoss) -> None:
    rows = random_rows()
    expected, gradient, _ = evaluate(loss_fn, rows, [slice(0, 6)])
    junk = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30], dtype=torch.float64)
    padded = {
        field.name: torch.cat([torch.where(rows.mask > 0, getattr(rows, field.name).detach(), junk), junk.expand(3, 5)])
        for field in dataclasses.fields(rows)
    }
    padded["mask"] = torch.cat([rows.mask, torch.zeros(3, 5)])
    spoilt = dataclasses.replace(rows, **padded)
    spoilt.logprobs.requires_grad_()
    total, found, metrics = evaluate(loss_fn, spoilt, [slice(0, 9)], rows.totals)
    assert total == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(found[:6], gradient, rtol=0, atol=1e-6)
    assert found[6:].abs().max() == 0
    assert all(math.isfinite(value) for value in metrics.values())


@every_loss
def test_a_batch_without_a_token_to_train_on_gives_a_finite_zero(loss_fn: PolicyLoss) -> None:
    rows = random_rows()
    rows.mask = torch.zeros_like(rows.mask)
    total, gradient, metrics = evaluate(loss_fn, rows, [slice(0, 6)], Totals(0, 0, 5))
    assert total == 0.0
    assert gradient.abs().max() == 0
    assert set(metrics.values()) == {0.0}
    assert loss_fn.finish(metrics) == metrics


@every_loss
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("gap", [25.0, -25.0, 500.0, -500.0])
def test_extreme_ratios_stay_finite_in_bfloat16(loss_fn: PolicyLoss, gap: float, sign: float) -> None:
    size = (2, 4)
    logprobs = torch.full(size, -0.5, dtype=torch.bfloat16).requires_grad_()
    away = torch.full(size, -0.5 - gap, dtype=torch.bfloat16)
    ids = torch.zeros(size, dtype=torch.long)
    batch = TextTrainBatch(ids, ids, torch.ones(size), torch.full(size, sign), away, away, None, None, away)
    loss, metrics = loss_fn.from_logprobs(logprobs, torch.ones(size, dtype=torch.bfloat16), batch, Totals(8, 2, 4))
    loss.backward()
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()
    assert all(torch.isfinite(value) for value in metrics.values())


@every_loss
def test_the_call_over_logits_equals_the_fast_path_at_a_temperature(loss_fn: PolicyLoss) -> None:
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 4, 7, generator=g, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 7, (3, 4), generator=g)
    mask = torch.tensor([[1.0, 1, 0, 1], [1, 0, 0, 0], [0, 1, 1, 1]], dtype=torch.float64)
    scaled = logits / 0.6
    old = compute_logprobs(logits.detach(), targets, 0.6) + 0.1
    advantages = torch.tensor([[1.0], [-0.5], [0.3]], dtype=torch.float64)
    loss, metrics = loss_fn(scaled, targets, advantages, old, mask, old - 0.2, old - 0.1)
    assert torch.isfinite(loss)
    batch = TextTrainBatch(targets, targets, mask, advantages.expand(3, 4), old, old - 0.2, None, None, old - 0.1)
    every = torch.log_softmax(scaled, -1)
    entropy = -(every.exp() * every).sum(-1)
    logprobs = every.gather(-1, targets[..., None])[..., 0]
    expected, others = loss_fn.from_logprobs(logprobs, entropy, batch, Totals(7, 3, 4))
    assert loss.item() == pytest.approx(expected.item(), abs=TINY)
    assert {n: v.item() for n, v in metrics.items()} == pytest.approx({n: v.item() for n, v in others.items()})


@every_loss
def test_on_policy_every_loss_has_the_gradient_of_reinforce(loss_fn: PolicyLoss) -> None:
    """With ratio 1, no KL and no entropy bonus, and aggregation alike; GMPO and RLOO weigh a sequence as one action."""
    rows = random_rows(spread=0.0)
    loss_fn.beta, loss_fn.entropy_coef, kept = 0.0, 0.0, (loss_fn.beta, loss_fn.entropy_coef, loss_fn.agg_type)
    loss_fn.agg_type = "sequence_mean"
    _, found, _ = evaluate(loss_fn, rows, [slice(0, 6)])
    _, expected, _ = evaluate(ReinforceLoss(agg_type="sequence_mean"), rows, [slice(0, 6)])
    loss_fn.beta, loss_fn.entropy_coef, loss_fn.agg_type = kept
    counts = rows.mask.sum(1, keepdim=True)
    by_sum = "RLOO" in type(loss_fn).__name__
    torch.testing.assert_close(found, expected * counts if by_sum else expected, rtol=0, atol=1e-9)


def test_both_variants_of_gspo_agree_where_the_advantage_is_constant() -> None:
    rows = random_rows()
    token = evaluate(GSPOLoss(0.2, 0.28), rows, [slice(0, 6)])
    sequence = evaluate(GSPOLoss(0.2, 0.28, variant="sequence"), rows, [slice(0, 6)])
    assert token[0] == pytest.approx(sequence[0], abs=TINY)
    torch.testing.assert_close(token[1], sequence[1], rtol=0, atol=TINY)


def test_the_dual_clip_bounds_what_a_bad_token_with_an_exploded_ratio_costs() -> None:
    logprobs = torch.tensor([[-0.1]], requires_grad=True)
    ids = torch.zeros(1, 1, dtype=torch.long)
    batch = TextTrainBatch(ids, ids, torch.ones(1, 1), torch.tensor([[-2.0]]), torch.tensor([[-5.1]]))
    loss, metrics = DAPOLoss(dual_clip=3.0).from_logprobs(logprobs, torch.zeros(1, 1), batch, Totals(1, 1))
    loss.backward()
    assert loss.item() == 6.0
    assert logprobs.grad.item() == 0.0
    assert metrics["clip/dual_fraction"] == 1.0
    unbounded, _ = DAPOLoss(dual_clip=None).from_logprobs(logprobs, torch.zeros(1, 1), batch, Totals(1, 1))
    assert unbounded.item() == pytest.approx(2 * math.exp(5.0), rel=1e-6)


def test_an_adaptive_penalty_moves_beta_towards_its_target_and_survives_a_checkpoint() -> None:
    loss_fn = DAPOLoss(beta=0.1, adaptive_kl=True, kl_target=0.5)
    assert loss_fn.after_step({"kl": 5.0}) == {"kl/beta": 0.1}
    assert loss_fn.beta == pytest.approx(0.102)
    loss_fn.after_step({"kl": 0.0})
    loss_fn.after_step({"kl": 0.45})
    assert loss_fn.beta == pytest.approx(0.102 * 0.98 * 0.99)
    again = DAPOLoss(beta=0.1, adaptive_kl=True, kl_target=0.5)
    again.load_state(loss_fn.state())
    assert again.beta == loss_fn.beta
    with pytest.raises(ValueError, match=r"grpo\.beta above 0"):
        DAPOLoss(adaptive_kl=True)


def test_metrics_are_means_over_computed_tokens_however_many_groups_had_no_signal() -> None:
    rows = random_rows()
    loss_fn = GRPOLoss(beta=0.1)
    alone = loss_fn.finish(evaluate(loss_fn, rows, [slice(0, 6)])[2])
    half = Totals(rows.totals.tokens * 2, rows.totals.sequences * 2, 5)
    among = loss_fn.finish(evaluate(loss_fn, rows, [slice(0, 6)], half)[2])
    assert among.pop("tokens/computed") == pytest.approx(alone.pop("tokens/computed") / 2)
    assert among == pytest.approx(alone)


def test_the_mismatch_metrics_follow_their_definitions() -> None:
    rows = random_rows()
    loss_fn = GRPOLoss(beta=0.0)
    found = loss_fn.finish(evaluate(loss_fn, rows, [slice(0, 3), slice(3, 6)])[2])
    gap = (rows.logprobs.detach() - rows.generator)[rows.mask > 0]
    weight = gap.exp()
    assert found["mismatch/mean_abs_logprob"] == pytest.approx(gap.abs().mean().item())
    assert found["mismatch/max_abs_logprob"] == pytest.approx(gap.abs().max().item())
    assert found["mismatch/k3"] == pytest.approx((weight - 1 - gap).mean().item())
    size = weight.sum() ** 2 / (len(weight) * weight.square().sum())
    assert found["mismatch/effective_samples"] == pytest.approx(size.item())


def test_responses_of_several_versions_are_left_out_of_one_mean_and_not_of_the_other() -> None:
    rows, loss_fn = random_rows(), GRPOLoss(beta=0.0)
    whole = loss_fn.finish(evaluate(loss_fn, rows, [slice(0, 6)])[2])
    crossed = torch.zeros_like(rows.mask)
    crossed[[1, 4]] = 1.0
    found = mismatch_of(loss_fn, rows, crossed)
    gap = (rows.logprobs.detach() - rows.generator).abs()
    kept = (rows.mask > 0) & (crossed == 0)
    assert found.pop(ONE_VERSION_GAP) == pytest.approx(gap[kept].mean().item())
    assert whole[ONE_VERSION_GAP] == whole["mismatch/mean_abs_logprob"]
    assert found == pytest.approx({name: value for name, value in whole.items() if name != ONE_VERSION_GAP})
    assert ONE_VERSION_GAP not in mismatch_of(loss_fn, rows, torch.ones_like(crossed))


def mismatch_of(loss_fn: PolicyLoss, rows: Rows, crossed: torch.Tensor) -> dict[str, float]:
    """The step's metrics when the rows came in two micro-batches, the first of them saying nothing of crossing."""
    sums: dict[str, float] = {}
    for part in (slice(0, 1), slice(1, 6)):
        batch = rows.batch(part)
        batch.crossed = crossed[part] if crossed[part].any() else None
        metrics = loss_fn.from_logprobs(rows.logprobs[part], rows.entropy[part], batch, rows.totals)[1]
        accumulate(sums, metrics)
    return loss_fn.finish({name: float(value) for name, value in sums.items()})


def test_equal_policies_have_no_mismatch_and_a_full_effective_sample() -> None:
    found = GRPOLoss(beta=0.0).finish(evaluate(GRPOLoss(beta=0.0), random_rows(spread=0.0), [slice(0, 6)])[2])
    assert found["mismatch/mean_abs_logprob"] == found["mismatch/max_abs_logprob"] == found["mismatch/k3"] == 0.0
    assert found["mismatch/effective_samples"] == pytest.approx(1.0)


@every_loss
def test_nothing_without_a_penalty_or_bonus_reaches_the_entropy(loss_fn: PolicyLoss) -> None:
    """An entropy that no bonus uses gets no gradient at all, which saves half of the head's backward pass."""
    rows = random_rows()
    kept, loss_fn.entropy_coef = loss_fn.entropy_coef, 0.0
    entropy = rows.entropy.clone().requires_grad_()
    loss, _ = loss_fn.from_logprobs(rows.logprobs, entropy, rows.batch(), rows.totals)
    loss.backward()
    loss_fn.entropy_coef = kept
    assert entropy.grad is None


@every_loss
def test_no_loss_waits_for_the_device(loss_fn: PolicyLoss) -> None:
    """Meta tensors have no values: whatever reads one back fails."""
    rows = random_rows()
    logprobs, entropy, batch = packed(rows, [0, 1, 2, 3])
    tensors = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    there = dataclasses.replace(batch, **{name: t.to("meta") for name, t in tensors.items() if t is not None})
    loss, metrics = loss_fn.from_logprobs(logprobs.to("meta"), entropy.to("meta"), there, rows.totals)
    assert loss.is_meta
    assert all(value.is_meta for value in metrics.values())
