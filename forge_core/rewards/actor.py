"""Rewards of completions: several functions, combined with weights.

Guarantees:
- Grades come in the order of the items. A failed grade is None with a status and a text, never 0.
- Each reward class is made once (per process), with its options.
- Rewards of the user run in grading processes, by default one: a grade that hangs costs one timeout, not the run.
  Built-in rewards run in this process unless ``workers`` is given; a timeout is kept only in grading processes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.config.references import revealed
from forge_core.rewards.grading import Grade, Graded, Outcome, RewardItem, Spec, grade_item
from forge_core.rewards.pool import WorkerPool
from forge_core.rewards.resolve import BUILTINS, RewardError, build

if TYPE_CHECKING:
    from forge_core.config.run_config import RewardFunction, RewardsSection
    from forge_core.stop import StopToken


class RewardActor:
    """Grades completions with the functions of a configuration, or with the ``grade`` of a subclass::

        class CustomReward(RewardActor):
            def grade(self, prompt, completion, metadata) -> float:
                return float(metadata["answer"] in completion)

    A subclass needs no ``__init__``; its own ``grade_many`` grades in this process, without a timeout, under the
    name of the class. Named in a configuration (``my_reward.py:CustomReward``) it is one function like any other.
    """

    grades_per_second: float = 0.0
    """Throughput of the last ``grade_many``."""

    _specs: Sequence[Spec] = ()
    _pool: WorkerPool | None = None
    _functions: Sequence[tuple[str, Grade]] = ()

    def __init__(
        self,
        functions: Sequence[RewardFunction] = (),
        *,
        timeout_s: float = 30.0,
        workers: int | None = None,
        folder: Path | None = None,
    ):
        """``functions``, ``timeout_s`` (seconds per item) and ``workers`` (grading processes) are those of the
        ``rewards`` section; ``folder`` is where reward files are looked for besides the working directory.

        Raises RewardError when a function cannot be imported, made or called.
        """
        if self._is_custom():
            if functions:
                raise RewardError(f"rewards: {type(self).__name__} defines grade, so it takes no functions")
            return
        if not functions:
            raise RewardError("rewards.functions is empty: name at least one reward, such as exact_match")
        self._specs = _specs(functions, folder)
        if workers is None and any(spec.path not in BUILTINS for spec in self._specs):
            workers = 1
        if workers is None:
            self._functions = [(spec.name, build(spec)) for spec in self._specs]
        else:
            self._pool = WorkerPool(self._specs, workers, timeout_s)

    @classmethod
    def from_config(cls, rewards: RewardsSection, folder: Path | None = None) -> RewardActor:
        """The actor that the ``rewards`` section of a configuration describes."""
        return cls(rewards.functions, timeout_s=rewards.timeout_s, workers=rewards.workers, folder=folder)

    def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
        """The reward of one completion. Raises RewardError when grading it fails. Subclasses override this."""
        graded = self.grade_many([RewardItem(prompt, completion, metadata)])[0]
        if graded.reward is None:
            raise RewardError(f"rewards: {graded.error}")
        return graded.reward

    def grade_many(self, items: Sequence[RewardItem], *, stop: StopToken | None = None) -> list[Graded]:
        """Grade ``items``, in order. Raises Stopped when ``stop`` is set meanwhile."""
        start = time.perf_counter()
        outcomes = self._pool.grade(items, stop) if self._pool else self._grade_here(items, stop)
        self.grades_per_second = len(items) / max(time.perf_counter() - start, 1e-9)
        weights = {spec.name: spec.weight for spec in self._specs} or {type(self).__name__: 1.0}
        return [_weighted(outcome, weights) for outcome in outcomes]

    def evaluate_response(self, prompt: str, response: str, target: Any) -> tuple[dict[str, float], float]:
        """Components of one response by name, and their plain mean. Raises RewardError when grading it fails."""
        graded = self.grade_many([RewardItem(prompt, response, {"answer": target})])[0]
        if graded.status != "ok":
            raise RewardError(f"rewards: {graded.error}")
        return graded.components, sum(graded.components.values()) / len(graded.components)

    def close(self) -> None:
        """End the grading processes, if there are any."""
        if self._pool is not None:
            self._pool.close()

    def _is_custom(self) -> bool:
        return type(self).grade is not RewardActor.grade

    def _grade_here(self, items: Sequence[RewardItem], stop: StopToken | None) -> list[Outcome]:
        functions = [(type(self).__name__, self.grade)] if self._is_custom() else self._functions
        outcomes = []
        for item in items:
            if stop is not None:
                stop.check()
            outcomes.append(grade_item(functions, item))
        return outcomes


def _specs(functions: Sequence[RewardFunction], folder: Path | None) -> list[Spec]:
    """Components with unique names: the part after the colon, numbered from the second use on. Their options hold the
    secrets that the configuration refers to."""
    names: list[str] = []
    for function in functions:
        name = function.path.rpartition(":")[2]
        used = sum(other.partition("#")[0] == name for other in names)
        names.append(f"{name}#{used + 1}" if used else name)
    folder = None if folder is None else folder.resolve()
    return [
        Spec(name, function.path, function.weight, revealed(function.options, "rewards.functions: options"), folder)
        for name, function in zip(names, functions, strict=True)
    ]


def _weighted(outcome: Outcome, weights: dict[str, float]) -> Graded:
    if outcome.status != "ok":
        return Graded(None, outcome.components, outcome.status, outcome.error)
    return Graded(sum(weights[name] * value for name, value in outcome.components.items()), outcome.components)
