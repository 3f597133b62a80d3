"""Rewards of completions: several functions, combined with weights.

Guarantees:
- Grades come in the order of the items. A failed grade is None with a status and a text, never 0.
- Each reward class is made once (per process), with its options.
- Rewards of the user, and built-in ones that may hang, run in grading processes, on all cores when there is much to
  do: a grade that hangs costs one timeout, not the run. Other built-in rewards run in this process unless ``workers``
  is given; a timeout is kept only in grading processes. Batched rewards run in this process and keep their own limits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.config.references import revealed
from forge_core.observability.metrics import replay
from forge_core.rewards.grading import BatchReward, Grade, Graded, Grading, RewardItem, Spec, combine, grade_item
from forge_core.rewards.pool import WorkerPool
from forge_core.rewards.resolve import RewardError, build, build_batch, can_hang, is_batch

if TYPE_CHECKING:
    from forge_core.config.reward_sections import BuiltinReward, RewardFunction
    from forge_core.config.run_config import RewardsSection
    from forge_core.stop import StopToken

MOST_WORKERS = 16  # by default: each is a Python process with what the rewards import


class RewardActor:
    """Grades completions with the functions of a configuration, or with the ``grade`` of a subclass:

        class CustomReward(RewardActor):
            def grade(self, prompt, completion, metadata) -> float:
                return float(metadata["answer"] in completion)

    A subclass needs no ``__init__``; its own ``grade_many`` grades in this process, without a timeout, under the
    name of the class. Named in a configuration (``my_reward.py:CustomReward``) it is one function like any other.
    """

    grades_per_second: float = 0.0
    """Throughput of the last ``grade_many``: items, each graded by all functions."""

    _specs: Sequence[Spec] = ()
    _pool: WorkerPool | None = None
    _pooled: Sequence[Spec] = ()
    _functions: Sequence[tuple[str, Grade]] = ()
    _batched: Sequence[tuple[str, BatchReward]] = ()

    def __init__(
        self,
        functions: Sequence[RewardFunction | BuiltinReward] = (),
        *,
        timeout_s: float = 30.0,
        workers: int | None = None,
        folder: Path | None = None,
    ):
        """``functions``, ``timeout_s`` (seconds for one grade of a function without its own) and ``workers`` (grading
        processes) are those of the ``rewards`` section; ``folder`` is where reward files are looked for besides the
        working directory.

        Raises RewardError when a function cannot be imported, made or called.
        """
        if self._is_custom():
            if functions:
                raise RewardError(f"rewards: {type(self).__name__} defines grade, so it takes no functions")
            return
        if not functions:
            raise RewardError("rewards.functions is empty: name at least one reward, such as exact_match")
        self._specs = _specs(functions, folder, timeout_s)
        self._batched = [(spec.name, build_batch(spec)) for spec in self._specs if is_batch(spec.path)]
        single = [spec for spec in self._specs if not is_batch(spec.path)]
        self._pooled = single if workers else [spec for spec in single if can_hang(spec.path)]
        self._functions = [(spec.name, build(spec)) for spec in single if spec not in self._pooled]
        if self._pooled:
            self._pool = WorkerPool(self._pooled, workers or min(usable_cores(), MOST_WORKERS))

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
        return self.grade_with_metrics(items, stop=stop)[0]

    def grade_with_metrics(
        self, items: Sequence[RewardItem], *, stop: StopToken | None = None
    ) -> tuple[list[Graded], dict[str, float]]:
        """Grade ``items``, in order, and tell of it: ``grades_per_second``; for each function ``<name>/seconds`` (its
        own, added up over processes) and ``<name>/failed``; what a batched reward counts, such as ``<name>/cost``."""
        start = time.perf_counter()
        columns, metrics = self._columns(items, stop)
        self.grades_per_second = len(items) / max(time.perf_counter() - start, 1e-9)
        for name, gradings in columns.items():
            metrics[f"{name}/seconds"] = sum(g.seconds for g in gradings)
            metrics[f"{name}/failed"] = float(sum(g.value is None for g in gradings))
        weights = {spec.name: spec.weight for spec in self._specs} or dict.fromkeys(self.names, 1.0)
        graded = [combine([(name, columns[name][i]) for name in self.names], weights) for i in range(len(items))]
        return graded, {"grades_per_second": self.grades_per_second, **metrics}

    def evaluate_response(self, prompt: str, response: str, target: Any) -> tuple[dict[str, float], float]:
        """Components of one response by name, and their plain mean. Raises RewardError when grading it fails."""
        graded = self.grade_many([RewardItem(prompt, response, {"answer": target})])[0]
        if graded.status != "ok":
            raise RewardError(f"rewards: {graded.error}")
        means = [value for name, value in graded.components.items() if "/" not in name]
        return graded.components, sum(means) / len(means)

    @property
    def names(self) -> list[str]:
        """The names of the components, in the order of the functions."""
        return [spec.name for spec in self._specs] or [type(self).__name__]

    def close(self) -> None:
        """End the grading processes and what batched rewards hold, if there are any."""
        if self._pool is not None:
            self._pool.close()
        for _, reward in self._batched:
            reward.close()

    def _is_custom(self) -> bool:
        return type(self).grade is not RewardActor.grade

    def _columns(
        self, items: Sequence[RewardItem], stop: StopToken | None
    ) -> tuple[dict[str, list[Grading]], dict[str, float]]:
        """The gradings of each function, and the metrics of the batched ones."""
        columns = self._grade_here(items, stop)
        metrics: dict[str, float] = {}
        if self._pool is not None:
            rows = self._pool.grade(items, stop)
            replay(metric for row in rows for grading in row for metric in grading.recorded)
            columns |= {spec.name: [row[place] for row in rows] for place, spec in enumerate(self._pooled)}
        for name, reward in self._batched:
            columns[name], counts = reward.grade_many(items, stop)
            metrics |= {f"{name}/{count}": value for count, value in counts.items()}
        return columns, metrics

    def _grade_here(self, items: Sequence[RewardItem], stop: StopToken | None) -> dict[str, list[Grading]]:
        functions = [(type(self).__name__, self.grade)] if self._is_custom() else self._functions
        columns: dict[str, list[Grading]] = {name: [] for name, _ in functions}
        for item in items:
            if stop is not None:
                stop.check()
            for name, grade in functions:
                columns[name].append(grade_item(grade, item))
        return columns


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _specs(functions: Sequence[RewardFunction | BuiltinReward], folder: Path | None, timeout_s: float) -> list[Spec]:
    """Components with unique names: the part after the colon, numbered from the second use on. Their options hold the
    secrets that the configuration refers to."""
    names: list[str] = []
    for function in functions:
        name = function.path.rpartition(":")[2]
        used = sum(other.partition("#")[0] == name for other in names)
        names.append(f"{name}#{used + 1}" if used else name)
    folder = None if folder is None else folder.resolve()
    return [
        Spec(
            name,
            function.path,
            function.weight,
            revealed(function.options, "rewards.functions: options"),
            folder,
            function.timeout_s or timeout_s,
        )
        for name, function in zip(names, functions, strict=True)
    ]
