"""Several weak verifiers vote; how much each vote counts is told from how often the verifiers agree.

Guarantees:
- No answer is needed to weigh the verifiers: see ``forge_core.rewards.agreement``. They are weighed anew in every call
  (a shard), so a reward is a function of the shard's grades, and a shard graded again has the same rewards.
- A verifier that fails is no vote against: the response is graded without it if at most ``missing`` have failed, else
  not at all.
- The verifiers run as rewards do: in grading processes, at once, with their own timeouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_core.config.reward_sections import verifier_section
from forge_core.rewards.agreement import Reliability, Votes, estimate, probability_good
from forge_core.rewards.grading import Graded, Grading, RewardItem

if TYPE_CHECKING:
    from forge_core.stop import StopToken


class Ensemble:
    """The probability that a response is good, given which ``verifiers`` grade it at ``threshold`` or above; with
    ``decision`` 1 when that is above one half, else 0.

    ``verifiers``: at least three, each as an element of ``rewards.functions``; their weights do not count.
    ``timeout_s``: for one grade of a verifier without its own. The components of a response have each verifier's grade,
    as ``ensemble/<verifier>``.
    """

    needs_answer = False  # its verifiers say themselves what they need

    def __init__(
        self,
        verifiers: Sequence[dict[str, Any]],
        threshold: float = 0.5,
        decision: bool = False,
        missing: int = 0,
        timeout_s: float = 30.0,
    ):
        from forge_core.rewards.actor import RewardActor

        self.check(verifiers, missing=missing)
        self._actor = RewardActor([verifier_section(verifier) for verifier in verifiers], timeout_s=timeout_s)
        self._threshold, self._decision, self._missing = threshold, decision, missing

    @staticmethod
    def check(verifiers: Sequence[dict[str, Any]], missing: int = 0, **options: Any) -> None:
        """Raise ValueError for too few verifiers: two that disagree say nothing of who is right."""
        if len(verifiers) - missing < 3:
            raise ValueError(
                f"{len(verifiers)} verifiers of which {missing} may be missing: three must be left to tell who is right"
            )

    def grade_many(
        self, items: Sequence[RewardItem], stop: StopToken | None = None
    ) -> tuple[list[Grading], dict[str, float]]:
        """See ``BatchReward``. Metrics: those of the verifiers, each one's ``<verifier>/accuracy`` as it was told from
        the agreement, and ``prior``, the share of good responses."""
        graded, metrics = self._actor.grade_with_metrics(items, stop=stop)
        del metrics["grades_per_second"]  # the caller measures its own
        names = self._actor.names
        values = np.array([[g.components.get(name, np.nan) for name in names] for g in graded]).reshape(-1, len(names))
        votes: Votes = np.where(np.isnan(values), np.nan, values >= self._threshold)
        usable = np.isnan(votes).sum(axis=1) <= self._missing
        voters = estimate(votes[usable])
        probabilities = probability_good(votes, voters)
        gradings = [self._grading(*row) for row in zip(graded, usable, probabilities, strict=True)]
        return gradings, {**metrics, **_told(names, voters)}

    def close(self) -> None:
        self._actor.close()

    def _grading(self, graded: Graded, usable: bool, probability: float) -> Grading:
        if not usable:
            return Grading(None, graded.status, graded.error, parts=graded.components)
        return Grading(float(probability > 0.5 if self._decision else probability), parts=graded.components)


def _told(names: Sequence[str], voters: Reliability) -> dict[str, float]:
    accuracies = zip(names, voters.accuracy.tolist(), strict=True)
    return {**{f"{name}/accuracy": value for name, value in accuracies}, "prior": voters.prior}
