"""Statistics of evaluations.

Invariants:
- Prompts are the unit of resampling: samples of one prompt are not independent, prompts are.
- Everything is a pure function of its input: the bootstrap draws from a generator of its own with a fixed seed, and a
  change of its number of draws is a change of the figure.

Sources: percentile bootstrap: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13. Paired
bootstrap of two systems on the same items: Koehn, Statistical Significance Tests for Machine Translation Evaluation
(EMNLP 2004). Paired permutation test: Fisher, The Design of Experiments (1935), section 21; p-values of drawn
permutations: Phipson and Smyth, Permutation P-values Should Never Be Zero (2010). pass@k: Chen et al., Evaluating Large
Language Models Trained on Code (2021), section 2.1. KL estimate: Schulman, Approximating KL Divergence (2020),
estimator k3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, expm1
from statistics import fmean

import numpy as np

DRAWS = 10_000
SEED = 20_040_725  # any number will do, as long as it stays
CONFIDENCE = 0.95
EXACT = 14  # differences up to which every permutation is looked at
_BLOCK = 2**22  # indices drawn at a time, so that memory stays small


@dataclass(frozen=True)
class Estimate:
    """A mean over ``items`` items, with the interval that covers it with probability ``confidence``."""

    mean: float
    low: float
    high: float
    items: int
    confidence: float = CONFIDENCE


def bootstrap_mean(values: Sequence[float], confidence: float = CONFIDENCE, draws: int = DRAWS) -> Estimate:
    """The mean of ``values`` (one per prompt) with its two-sided percentile interval. ValueError without values."""
    means = bootstrap_means(values, draws)
    tail = (1 - confidence) / 2
    low, high = (float(np.quantile(means, q)) for q in (tail, 1 - tail))
    mean = fmean(values)  # of equal values it may be rounded otherwise than theirs
    return Estimate(mean, min(low, mean), max(high, mean), len(values), confidence)


def lower_bound(values: Sequence[float], confidence: float = CONFIDENCE, draws: int = DRAWS) -> float:
    """The one-sided bound that the mean of ``values`` exceeds with probability ``confidence``."""
    return float(np.quantile(bootstrap_means(values, draws), 1 - confidence))


def bootstrap_means(values: Sequence[float], draws: int = DRAWS) -> np.ndarray:
    """``[draws]`` means of samples of ``values``, drawn with replacement, each as large as ``values``."""
    if not values:
        raise ValueError("a mean of no values: nothing was evaluated")
    data, random = np.asarray(values, dtype=np.float64), np.random.default_rng(SEED)
    rows = max(1, _BLOCK // len(data))
    sizes = [min(rows, draws - start) for start in range(0, draws, rows)]
    return np.concatenate([data[random.integers(len(data), size=(n, len(data)))].mean(axis=1) for n in sizes])


def paired_p_value(differences: Sequence[float], draws: int = DRAWS) -> float:
    """Two-sided p-value of a paired permutation test: how often the mean of ``differences`` (one per prompt) would be
    as far from 0 if each had either sign with equal probability. Exact up to ``EXACT`` differences that are not 0."""
    values = np.asarray([d for d in differences if d != 0.0], dtype=np.float64)
    if len(values) == 0:
        return 1.0
    seen = abs(values.sum()) * (1 - 1e-12)  # sums of equal terms in another order differ by rounding
    if len(values) <= EXACT:
        signs = 1 - 2 * (np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1)
        return float(np.mean(np.abs(signs @ values) >= seen))
    random, rows = np.random.default_rng(SEED), max(1, _BLOCK // len(values))
    sizes = [min(rows, draws - start) for start in range(0, draws, rows)]
    signs_of = lambda n: 1.0 - 2.0 * random.integers(2, size=(n, len(values)))
    extreme = sum(int(np.sum(np.abs(signs_of(n) @ values) >= seen)) for n in sizes)
    return (1 + extreme) / (1 + draws)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of ``k`` samples is correct, from ``samples`` of which ``correct``
    are: ``1 - C(samples - correct, k) / C(samples, k)``. ValueError when there are fewer than ``k`` samples."""
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {correct} correct among {samples} samples: needs 0 <= correct <= samples >= k")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def kl_estimate(log_ratios: Sequence[float]) -> float:
    """KL(sampler || other) per token, from ``log other(token) - log sampler(token)`` of tokens that the sampler drew:
    the mean of ``exp(r) - 1 - r``, which is never negative. 0 without tokens."""
    return fmean(expm1(r) - r for r in log_ratios) if log_ratios else 0.0
