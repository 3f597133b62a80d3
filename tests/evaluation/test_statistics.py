"""The statistics of evaluations, against values known from elsewhere."""

from __future__ import annotations

from itertools import combinations, product
from math import log, sqrt

import numpy as np
import pytest

from forge_core.evaluation.statistics import (
    DRAWS,
    bootstrap_mean,
    bootstrap_means,
    kl_estimate,
    lower_bound,
    paired_p_value,
    pass_at_k,
)


@pytest.mark.parametrize(
    ("samples", "correct", "k", "expected"),
    [(10, 3, 1, 0.3), (5, 2, 2, 0.7), (4, 0, 4, 0.0), (4, 1, 4, 1.0), (8, 8, 1, 1.0)],
)
def test_pass_at_k_is_the_published_estimator(samples: int, correct: int, k: int, expected: float):
    assert pass_at_k(samples, correct, k) == pytest.approx(expected)


def test_pass_at_k_of_many_samples_is_the_product_of_the_paper():
    samples, correct, k = 200, 10, 100
    product = 1 - np.prod(1 - k / np.arange(samples - correct + 1, samples + 1))
    assert pass_at_k(samples, correct, k) == pytest.approx(product, rel=1e-12)


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample():
    outcomes = [True, True, False, False, False, False]
    for k in range(1, 7):
        subsets = list(combinations(outcomes, k))
        assert pass_at_k(6, 2, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 5, 1), (4, 1, 5), (4, 1, 0), (4, -1, 1)])
def test_pass_at_k_refuses_what_cannot_be_estimated(samples: int, correct: int, k: int):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(samples, correct, k)


def test_the_bootstrap_of_two_values_has_the_distribution_that_counting_gives():
    means = bootstrap_means([0.0, 1.0])
    shares = [float(np.mean(means == value)) for value in (0.0, 0.5, 1.0)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.02)
    estimate = bootstrap_mean([0.0, 1.0])
    assert (estimate.mean, estimate.low, estimate.high, estimate.items) == (0.5, 0.0, 1.0, 2)


def test_the_interval_of_many_values_is_the_normal_one():
    values = np.random.default_rng(1).normal(3.0, 2.0, size=2000).tolist()
    spread = 1.96 * np.std(values) / sqrt(len(values))
    estimate = bootstrap_mean(values)
    assert estimate.high - estimate.mean == pytest.approx(spread, rel=0.05)
    assert estimate.mean - estimate.low == pytest.approx(spread, rel=0.05)
    assert estimate.mean - lower_bound(values, 0.95) == pytest.approx(spread * 1.645 / 1.96, rel=0.05)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    random = np.random.default_rng(2)
    trials = [bootstrap_mean(random.binomial(1, 0.3, 100).tolist(), 0.9, draws=400) for _ in range(300)]
    assert np.mean([e.low <= 0.3 <= e.high for e in trials]) == pytest.approx(0.9, abs=0.05)


def test_the_paired_test_is_that_of_darwins_plants():
    # Fisher (1935), section 21: 15 pairs of plants, differences in eighths of an inch; of the 32,768 arrangements of
    # signs 863 have a sum at least as large, so 1,726 are as extreme on either side.
    eighths = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    assert paired_p_value(eighths) == pytest.approx(1726 / 2**15, abs=0.006)  # more than EXACT: drawn
    assert paired_p_value([*eighths[:-1], 0.0]) == all_signs(eighths[:-1])


def all_signs(values: list[float]) -> float:
    sums = [sum(s * v for s, v in zip(signs, values, strict=True)) for signs in product((1, -1), repeat=len(values))]
    return sum(abs(total) >= abs(sum(values)) - 1e-9 for total in sums) / len(sums)


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([0.1] * 6, 2 / 64),  # two-sided sign test: only all of one sign is as extreme
        ([1.0, 1.0, 1.0, -1.0], 10 / 16),  # sums of 4, 2: two with 4, eight with 2
        ([0.5], 1.0),
        ([0.0, 0.0], 1.0),
        ([], 1.0),
    ],
)
def test_the_paired_test_of_few_prompts_is_exact(differences: list[float], expected: float):
    assert paired_p_value(differences) == expected
    assert paired_p_value([-d for d in differences]) == expected


def test_equal_policies_are_called_different_as_rarely_as_the_level_says():
    random = np.random.default_rng(4)
    values = [paired_p_value(random.choice([-1.0, 0.0, 0.5, 1.0, -0.5], 60).tolist(), draws=400) for _ in range(300)]
    assert np.mean([p <= 0.05 for p in values]) == pytest.approx(0.05, abs=0.03)
    assert np.mean([p <= 0.5 for p in values]) == pytest.approx(0.5, abs=0.08)


def test_a_gain_on_most_prompts_is_significant_and_never_certain():
    p = paired_p_value([1.0] * 40 + [-1.0] * 10)
    assert 0 < p < 0.001
    assert paired_p_value([1.0] * 60) == 1 / (1 + DRAWS), "no drawn arrangement is as extreme; what was seen is one"


def test_equal_values_have_no_spread_and_equal_input_gives_equal_figures():
    estimate = bootstrap_mean([0.25] * 7)
    assert (estimate.mean, estimate.low, estimate.high) == (0.25, 0.25, 0.25)
    for value, count in ((0.1, 64), (0.1, 100), (0.1, 256), (0.9, 128), (0.95, 128)):
        estimate = bootstrap_mean([value] * count)
        assert estimate.low <= estimate.mean <= estimate.high
    assert bootstrap_mean([0.1, 0.5, 0.9, 0.4]) == bootstrap_mean([0.1, 0.5, 0.9, 0.4])


def test_no_values_have_no_mean():
    with pytest.raises(ValueError, match="no values"):
        bootstrap_mean([])


def test_the_kl_estimate_is_that_of_two_known_distributions():
    sampler, other = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
    truth = float(np.sum(sampler * np.log(sampler / other)))
    tokens = np.random.default_rng(3).choice(3, size=100_000, p=sampler)
    ratios = np.log(other / sampler)[tokens].tolist()
    assert kl_estimate(ratios) == pytest.approx(truth, rel=0.02)
    assert kl_estimate([0.0, 0.0]) == 0.0
    assert kl_estimate([log(2)]) == pytest.approx(1 - log(2))
    assert kl_estimate([]) == 0.0
