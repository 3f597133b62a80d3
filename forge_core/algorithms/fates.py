"""What becomes of every planned episode: trained, or dropped for one reason.

Invariants:
- Each planned episode gets exactly one fate; ``trained`` and ``dropped`` exclude each other.
- The staleness bound is checked here, at consumption: an episode older than ``max_staleness`` is an error.
- A group without signal (``zero_variance``) is not computed, but its tokens and sequences stay in the global
  denominators: the step is what it would be had its zero advantages been computed. It gets no KL gradient either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from forge_core.algorithms.advantages import group_advantages, has_signal
from forge_core.data_model import Episode

PROMPT_TOO_LONG = "prompt_too_long"
DEADLINE = "deadline"
GRADING_FAILED = "grading_failed"
GROUP_TOO_SMALL = "group_too_small"
ZERO_VARIANCE = "zero_variance"


class StalenessError(RuntimeError):
    """An episode is older than the bound allows, or newer than the step that trains on it."""


@dataclass(frozen=True)
class Fate:
    """One row of the ``training`` table (``advantage`` 0 and ``age`` 0 where they do not apply)."""

    episode_id: str
    advantage: float
    age: int
    trained: bool
    dropped: str | None
    loss_tokens: int

    def row(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class PlannedGroup:
    """The episode ids of one group in sample order; ``skipped`` is the reason why it was never generated."""

    episode_ids: tuple[str, ...]
    skipped: str | None = None


def decide_fates(
    groups: Sequence[PlannedGroup],
    episodes: Mapping[str, Episode],
    *,
    batch: int,
    max_staleness: int,
    normalize: bool,
    eps: float,
) -> list[Fate]:
    """Fates of all planned episodes in plan order; ``episodes`` holds those that were generated, by id.

    Raises StalenessError when an episode's ``policy_version`` is not in ``[batch - max_staleness, batch]``.
    """
    fates: list[Fate] = []
    for group in groups:
        fates += _group_fates(group, episodes, batch, max_staleness, normalize, eps)
    return fates


def _group_fates(
    group: PlannedGroup, episodes: Mapping[str, Episode], batch: int, bound: int, normalize: bool, eps: float
) -> list[Fate]:
    if group.skipped:
        return [Fate(i, 0.0, 0, False, group.skipped, 0) for i in group.episode_ids]
    ages = {i: checked_age(episodes[i], batch, bound) for i in group.episode_ids if i in episodes}
    graded = {i: reward for i in ages if (reward := episodes[i].reward) is not None}
    reason = _group_reason(list(graded.values()))
    advantages: dict[str, float] = {}
    if reason is None:
        values = group_advantages(list(graded.values()), normalize=normalize, eps=eps)
        advantages = dict(zip(graded, values, strict=True))
    return [_fate(i, episodes.get(i), ages.get(i, 0), advantages.get(i, 0.0), reason) for i in group.episode_ids]


def _group_reason(rewards: list[float]) -> str | None:
    if len(rewards) < 2:
        return GROUP_TOO_SMALL
    return None if has_signal(rewards) else ZERO_VARIANCE


def _fate(episode_id: str, episode: Episode | None, age: int, advantage: float, reason: str | None) -> Fate:
    if episode is None:
        return Fate(episode_id, 0.0, 0, False, DEADLINE, 0)
    if episode.reward is None:
        return Fate(episode_id, 0.0, age, False, GRADING_FAILED, 0)
    counted = 0 if reason == GROUP_TOO_SMALL else sum(episode.response_mask)
    return Fate(episode_id, advantage, age, reason is None, reason, counted)


def checked_age(episode: Episode, batch: int, max_staleness: int) -> int:
    """Training steps between the version that sampled the episode and the version that step ``batch`` trains."""
    age = batch - episode.policy_version
    if not 0 <= age <= max_staleness:
        raise StalenessError(
            f"episode {episode.episode_id} was sampled by version {episode.policy_version}; training step {batch} "
            f"accepts versions {batch - max_staleness} to {batch} (max_staleness={max_staleness})"
        )
    return age
