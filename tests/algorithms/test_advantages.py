"""Advantages of groups, of batches of groups and of tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_core.algorithms.advantages import (
    build_estimator,
    by_group,
    gae,
    group_advantages,
    leave_one_out,
    length_weighted,
    max_rl,
    reinforce_plus_plus,
    returns_to_go,
    scale_by_batch,
    whiten,
)
from forge_core.config.algorithm_sections import AdvantageSection

ESTIMATORS = [group_advantages, leave_one_out, max_rl, lambda r: length_weighted(r, [1] * len(r))]


@pytest.mark.parametrize("estimate", ESTIMATORS)
@pytest.mark.parametrize("value", [0.35, 0.1, 0.7, 1e6])
def test_equal_rewards_give_exactly_zero(estimate, value):
    assert estimate([value] * 7) == [0.0] * 7


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_a_group_of_one_is_an_error(estimate):
    with pytest.raises(ValueError, match="at least two"):
        estimate([1.0])


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8))
def test_leave_one_out_is_each_reward_minus_the_mean_of_the_others(rewards):
    others = [sum(rewards[:i] + rewards[i + 1 :]) / (len(rewards) - 1) for i in range(len(rewards))]
    expected = [r - o for r, o in zip(rewards, others, strict=True)]
    assert leave_one_out(rewards) == pytest.approx(expected, abs=1e-7)


def test_the_variance_may_be_plain():
    assert group_advantages([1.0, 0.0], eps=0.0, ddof=0) == [1.0, -1.0]
    assert group_advantages([1.0, 0.0], eps=0.0) == pytest.approx([0.70711, -0.70711], abs=1e-5)


def test_max_rl_divides_by_the_mean_and_gives_nothing_where_it_is_not_positive():
    assert max_rl([1.0, 0.0, 0.0, 0.0]) == pytest.approx([3.0, -1.0, -1.0, -1.0])
    assert max_rl([-1.0, 0.0]) == [0.0, 0.0]


def test_a_length_weighted_baseline():
    assert length_weighted([1.0, 0.0], [30, 10]) == pytest.approx([0.25, -0.75])


def test_groups_of_a_batch_keep_its_order_and_a_group_of_one_has_no_advantage():
    rewards, groups = [1.0, 5.0, 0.0, 3.0], ["a", "b", "a", "c"]
    assert by_group(leave_one_out, groups, rewards) == [1.0, 0.0, -1.0, 0.0]
    assert by_group(leave_one_out, groups, rewards, single="reward") == [1.0, 5.0, -1.0, 3.0]


def test_one_deviation_for_the_whole_batch():
    rewards, groups = [1.0, 0.0, 3.0, 1.0], [0, 0, 1, 1]
    centred = by_group(lambda r: group_advantages(r, normalize=False), groups, rewards)
    std = torch.tensor(rewards).std().item()
    assert scale_by_batch(centred, rewards, eps=0.0) == pytest.approx([a / std for a in [0.5, -0.5, 1.0, -1.0]])
    assert scale_by_batch([0.0] * 4, rewards) == [0.0] * 4


def test_the_configured_estimator():
    rewards = [1.0, 0.0, 0.0]
    made = {name: build_estimator(AdvantageSection(estimator=name)) for name in ("group", "leave_one_out", "max_rl")}
    assert {name: estimate(rewards) for name, estimate in made.items()} == {
        "group": group_advantages(rewards),
        "leave_one_out": leave_one_out(rewards),
        "max_rl": max_rl(rewards),
    }
    assert build_estimator(AdvantageSection(normalize=False))(rewards) == group_advantages(rewards, normalize=False)


def test_returns_step_over_tokens_that_do_not_count():
    rewards = torch.tensor([[0.0, 9.0, 0.0, 1.0, 9.0]])
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]])
    assert returns_to_go(rewards, mask, gamma=0.5).tolist() == [[0.25, 0.0, 0.5, 1.0, 0.0]]


def test_reinforce_plus_plus_whitens_over_the_tokens_of_the_batch():
    mask = torch.tensor([[1.0, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.float64)
    found, returns = reinforce_plus_plus(torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64), mask)
    assert returns.tolist() == [[1.0, 1.0, 0.0], [-2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    valid = found[mask > 0]
    assert valid.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert valid.std().item() == pytest.approx(1.0, abs=1e-6)
    assert found[mask == 0].abs().max() == 0


def test_whitening_nothing_gives_nothing():
    assert whiten(torch.ones(2, 2), torch.zeros(2, 2)).abs().max() == 0
    assert whiten(torch.full((1, 1), 3.0), torch.ones(1, 1)).item() == 0


def test_generalised_advantages_by_hand():
    rewards, values = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[0.5, 1.0, 1.5]])
    found, returns = gae(rewards, values, torch.ones(1, 3), gamma=0.9, lam=0.5)
    last = 2.0 - 1.5
    middle = 0.0 + 0.9 * 1.5 - 1.0 + 0.45 * last
    first = 1.0 + 0.9 * 1.0 - 0.5 + 0.45 * middle
    torch.testing.assert_close(found, torch.tensor([[first, middle, last]]))
    torch.testing.assert_close(returns, found + values)


def test_generalised_advantages_step_over_a_tool_s_tokens():
    rewards, values = torch.tensor([[1.0, 7.0, 2.0]]), torch.tensor([[0.5, 8.0, 1.5]])
    with_tool, _ = gae(rewards, values, torch.tensor([[1.0, 0.0, 1.0]]))
    without, _ = gae(rewards[:, [0, 2]], values[:, [0, 2]], torch.ones(1, 2))
    torch.testing.assert_close(with_tool[:, [0, 2]], without)
