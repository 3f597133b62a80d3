"""How good voters are, told from how often they agree, without knowing the truth.

The model: each item is good with probability ``prior``, and voter ``i`` votes for it with probability ``hit_i`` when it
is good and ``1 - reject_i`` when it is not, independently of the other voters. Then votes alone tell the accuracies,
but for one thing: that most voters are better than chance has to be assumed (all of them turned round vote alike).
Fitted by expectation-maximisation (Dawid and Skene, 1979) with a weak Beta prior, from the majority's vote on; Weaver
(arXiv 2506.18203) combines weak verifiers of language models by the same idea.

Invariants:
- The result is a function of the votes; items and voters may come in any order.
- A missing vote (nan) tells nothing, for or against.
- With little or no agreement to learn from, weights stay near equal: the result is then the majority's vote.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Votes = NDArray[np.float64]  # [items, voters], each 1, 0 or nan

_ROUNDS, _CONVERGED = 500, 1e-8
_PRIOR_RIGHT, _PRIOR_WRONG = 3.5, 1.5  # as if each voter had been right 3.5 times of 5 on good and on bad items before
_SURE = 0.02  # how far from certain a voter or the share of good items stays


@dataclass(frozen=True)
class Reliability:
    """``hit[i]``: share of good items that voter ``i`` votes for; ``reject[i]``: share of bad ones that it does not;
    ``prior``: share of good items."""

    hit: NDArray[np.float64]
    reject: NDArray[np.float64]
    prior: float

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """Share of items on which each voter is right, at this share of good items."""
        return self.prior * self.hit + (1 - self.prior) * self.reject


def estimate(votes: Votes) -> Reliability:
    """How good each voter is. ``votes``: [items, voters]."""
    good = _majority(votes)
    for _ in range(_ROUNDS):
        found = _reliability(votes, good)
        updated = probability_good(votes, found)
        change = float(np.max(np.abs(updated - good), initial=0.0))
        good = updated
        if change < _CONVERGED:
            break
    return _reliability(votes, good)


def probability_good(votes: Votes, voters: Reliability) -> NDArray[np.float64]:
    """Probability that each item is good, given its votes: [items]. Each vote counts by the logarithm of how much
    likelier it is for a good item than for a bad one."""
    present = ~np.isnan(votes)
    yes = np.log(voters.hit / (1 - voters.reject))
    no = np.log((1 - voters.hit) / voters.reject)
    evidence = np.where(present, np.where(votes == 1, yes, no), 0.0).sum(axis=1)
    return 1 / (1 + np.exp(-(evidence + np.log(voters.prior / (1 - voters.prior)))))


def _majority(votes: Votes) -> NDArray[np.float64]:
    """The share of votes for each item; one half without any."""
    counts = (~np.isnan(votes)).sum(axis=1)
    return np.where(counts > 0, np.nansum(votes, axis=1) / np.maximum(counts, 1), 0.5)


def _reliability(votes: Votes, good: NDArray[np.float64]) -> Reliability:
    """The likeliest voters, were ``good`` the probability that each item is good."""
    present = ~np.isnan(votes)
    yes, weight = np.nan_to_num(votes), good[:, None]
    hit = _share((yes * weight).sum(axis=0), (present * weight).sum(axis=0))
    reject = _share(((1 - yes) * present * (1 - weight)).sum(axis=0), (present * (1 - weight)).sum(axis=0))
    prior = (good.sum() + 1) / (len(good) + 2)
    return Reliability(hit, reject, float(np.clip(prior, _SURE, 1 - _SURE)))


def _share(right: NDArray[np.float64], total: NDArray[np.float64]) -> NDArray[np.float64]:
    smoothed = (right + _PRIOR_RIGHT) / (total + _PRIOR_RIGHT + _PRIOR_WRONG)
    return np.clip(smoothed, _SURE, 1 - _SURE)
