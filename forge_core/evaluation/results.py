"""What a stored evaluation says: its summary, and the comparison of two prompt by prompt.

Invariants:
- The reward of a prompt is the mean over its graded samples; the reward of an evaluation is the mean over prompts.
- A comparison looks at the prompts that both evaluations answered, and at nothing else.
- A sample whose grading failed counts nowhere but in ``failed_grades``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from forge_core.data_model import Episode
from forge_core.evaluation.statistics import (
    CONFIDENCE,
    Estimate,
    bootstrap_mean,
    lower_bound,
    paired_p_value,
    pass_at_k,
)
from forge_core.evaluation.suite import place_of
from forge_core.runs.episodes import add_rewards, read_episodes
from forge_core.store import Store, StoreError

CORRECT = 1.0  # a sample with this reward or more counts as correct


@dataclass(frozen=True)
class Evaluation:
    """A stored evaluation. ``provenance`` has ``seconds`` and ``tokens`` of sampling, and how many were ``asked``."""

    prefix: str
    episodes: list[Episode]
    provenance: dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """Figures of an evaluation. ``passes`` maps k to pass@k; ``missing`` samples were not answered in time."""

    reward: Estimate
    passes: dict[int, float]
    mean_tokens: float
    truncated: float
    samples: int
    failed_grades: int
    missing: int = 0
    tasks: dict[str, Summary] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        tasks = {name: summary.to_json() for name, summary in self.tasks.items()}
        return {**asdict(self), "passes": {str(k): share for k, share in self.passes.items()}, "tasks": tasks}


@dataclass(frozen=True)
class Comparison:
    """``gain``: reward of one less the other, over prompts; ``bound``: what it exceeds with its confidence;
    ``p_value``: of the paired permutation test that there is no difference."""

    gain: Estimate
    bound: float
    better: int
    equal: int
    worse: int
    p_value: float


def read_evaluation(store: Store, prefix: str) -> Evaluation:
    """The evaluation stored at ``prefix``. Raises NotFound, and StoreError for one without a graded sample."""
    episodes = read_episodes(store, prefix)
    add_rewards(store, prefix, episodes)
    if not any(e.reward is not None for e in episodes):
        raise StoreError(f"{prefix} in the store {store.uri} holds no graded sample: there is nothing to compare")
    return Evaluation(prefix, episodes, store.open_published(prefix).manifest.provenance)


def summarise(evaluation: Evaluation, confidence: float = CONFIDENCE) -> Summary:
    """The figures of an evaluation, over all prompts and by task."""
    by_task: dict[str, list[Episode]] = defaultdict(list)
    for episode in evaluation.episodes:
        by_task[episode.task].append(episode)
    graded = {t: es for t, es in sorted(by_task.items()) if any(e.reward is not None for e in es)}
    tasks = {task: _summary(episodes, confidence) for task, episodes in graded.items()} if len(by_task) > 1 else {}
    asked = evaluation.provenance.get("asked", len(evaluation.episodes))
    return _summary(evaluation.episodes, confidence, asked - len(evaluation.episodes), tasks)


def compare(one: Evaluation, other: Evaluation, confidence: float = CONFIDENCE) -> Comparison:
    """How much better ``one`` is than ``other``, paired over prompts: bootstrap and permutation test. Raises StoreError
    when they have no prompt in common."""
    ours, theirs = (_rewards(e.episodes) for e in (one, other))
    common = [key for key in ours if key in theirs]
    if not common:
        raise StoreError(
            f"{one.prefix} and {other.prefix} have no prompt in common: evaluate both with one configuration"
        )
    gains = [fmean(ours[key]) - fmean(theirs[key]) for key in common]
    better, worse = sum(g > 0 for g in gains), sum(g < 0 for g in gains)
    bound = lower_bound(gains, confidence)
    equal = len(gains) - better - worse
    return Comparison(bootstrap_mean(gains, confidence), bound, better, equal, worse, paired_p_value(gains))


def _summary(
    episodes: Sequence[Episode], confidence: float, missing: int = 0, tasks: dict[str, Summary] | None = None
) -> Summary:
    rewards = _rewards(episodes)
    return Summary(
        reward=bootstrap_mean([fmean(values) for values in rewards.values()], confidence),
        passes=_passes(list(rewards.values())),
        mean_tokens=fmean(len(e.response_ids) for e in episodes),
        truncated=fmean(e.finish_reason == "length" for e in episodes),
        samples=len(episodes),
        failed_grades=sum(e.reward is None for e in episodes),
        missing=missing,
        tasks=tasks or {},
    )


def _rewards(episodes: Sequence[Episode]) -> dict[tuple[str, int], list[float]]:
    """The rewards of the graded samples of each prompt, in the order of the prompts. A prompt is known by its id and by
    which of its repetitions it is; its place is another where the set has grown meanwhile."""
    places = sorted({(place_of(e.episode_id)[0], e.prompt_id) for e in episodes})
    repeated: dict[str, int] = defaultdict(int)
    keys = {}
    for place, prompt_id in places:
        keys[place] = (prompt_id, repeated[prompt_id])
        repeated[prompt_id] += 1
    found: dict[tuple[str, int], list[float]] = {keys[place]: [] for place, _ in places}
    for e in episodes:
        if e.reward is not None:
            found[keys[place_of(e.episode_id)[0]]].append(e.reward)
    return {key: values for key, values in found.items() if values}


def _passes(rewards: Sequence[Sequence[float]]) -> dict[int, float]:
    """pass@1, and pass@k for the powers of two up to the samples that every prompt has, and for all of them."""
    most = min(len(values) for values in rewards)
    ks = sorted({k for k in (2**i for i in range(most.bit_length())) if k <= most} | {most})
    counts = [(len(values), sum(value >= CORRECT for value in values)) for values in rewards]
    return {k: fmean(pass_at_k(n, correct, k) for n, correct in counts) for k in ks}
