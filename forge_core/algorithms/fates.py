"""What becomes of every planned episode: trained, or dropped for one reason.

Invariants:
- Each planned episode gets exactly one fate; ``trained`` and ``dropped`` exclude each other.
- The staleness bound is checked here, at consumption: an episode older than ``max_staleness`` is an error.
- A group without signal (``zero_variance``) is not computed, but its tokens and sequences stay in the global
  denominators: the step is what it would be had its zero advantages been computed. It gets no KL gradient either.
- Where the loss has an entropy bonus (``explores``) such a group is trained, with advantage 0: those are the prompts
  on which the policy has stopped to explore.
- With dynamic sampling (DAPO, arXiv 2503.14476) such groups were replaced: they leave the denominators too, and groups
  with signal beyond the planned number are ``surplus``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from forge_core.algorithms.advantages import group_advantages, has_signal, whiten_sequences
from forge_core.data_model import Episode

PROMPT_TOO_LONG = "prompt_too_long"
DEADLINE = "deadline"
ENVIRONMENT = "environment"  # it failed, or gave no answer in time
GRADING_FAILED = "grading_failed"
GROUP_TOO_SMALL = "group_too_small"
ZERO_VARIANCE = "zero_variance"
SURPLUS = "surplus"
TRUNCATED = "truncated"


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
        return dict(self.__dict__)


@dataclass(frozen=True)
class PlannedGroup:
    """The episode ids of one group in sample order; ``skipped`` is the reason why it was never generated."""

    episode_ids: tuple[str, ...]
    skipped: str | None = None


@dataclass(frozen=True)
class FateRules:
    """How fates are decided. ``advantages`` turns a group's rewards into advantages. ``wanted`` is the number of
    groups with signal that dynamic sampling fills a batch with; None: no dynamic sampling. ``truncated``: what becomes
    of episodes that were cut at the length limit (``keep``, ``mask``, ``zero_advantage``). ``compares``: whether a
    group's rewards are compared with each other; if not, a group needs neither two rewards nor differences.
    ``whitens``: whether advantages are whitened over the tokens of the batch in the end. ``explores``: whether groups
    without signal are trained for the entropy bonus."""

    max_staleness: int
    advantages: Callable[[Sequence[float]], list[float]] = group_advantages
    wanted: int | None = None
    truncated: str = "keep"
    compares: bool = True
    whitens: bool = False
    explores: bool = False


def decide_fates(
    groups: Sequence[PlannedGroup],
    episodes: Mapping[str, Episode],
    batch: int,
    rules: FateRules,
    missing: Mapping[str, str] | None = None,
) -> list[Fate]:
    """Fates of all planned episodes in plan order; ``episodes`` holds those that were generated, by id. ``missing``:
    why others were not, where it was not the deadline.

    Raises StalenessError when an episode's ``policy_version`` is not in ``[batch - max_staleness, batch]``.
    """
    fates: list[Fate] = []
    left = len(groups) if rules.wanted is None else rules.wanted
    for group in groups:
        signal = group_has_signal(group, episodes)
        fates += _group_fates(group, episodes, batch, rules, SURPLUS if signal and not left else None)
        left -= signal and left > 0
    if missing:
        fates = [replace(f, dropped=missing.get(f.episode_id, f.dropped)) if f.dropped else f for f in fates]
    return _whitened(fates, _without_advantage(groups, episodes, rules)) if rules.whitens else fates


def _whitened(fates: list[Fate], left_out: set[str]) -> list[Fate]:
    whitened = [f for f in fates if f.trained and f.episode_id not in left_out]
    values = whiten_sequences([f.advantage for f in whitened], [f.loss_tokens for f in whitened])
    found = {f.episode_id: value for f, value in zip(whitened, values, strict=True)}
    return [replace(f, advantage=found.get(f.episode_id, f.advantage)) for f in fates]


def _without_advantage(groups: Sequence[PlannedGroup], episodes: Mapping[str, Episode], rules: FateRules) -> set[str]:
    """Episodes that keep advantage 0, whatever the others' mean: of groups without signal, and those that were cut."""
    equal = [g for g in groups if rules.compares and not group_has_signal(g, episodes)]
    cut = [e for e in episodes.values() if e.finish_reason == "length" and rules.truncated == "zero_advantage"]
    return {i for group in equal for i in group.episode_ids} | {e.episode_id for e in cut}


def group_has_signal(group: PlannedGroup, episodes: Mapping[str, Episode]) -> bool:
    """Whether a group has at least two rewards and they differ."""
    return not group.skipped and _group_reason(list(_rewards(group, episodes).values()), True) is None


def _rewards(group: PlannedGroup, episodes: Mapping[str, Episode]) -> dict[str, float]:
    members = (episodes[i] for i in group.episode_ids if i in episodes)
    return {e.episode_id: e.reward for e in members if e.reward is not None}


def _group_fates(
    group: PlannedGroup, episodes: Mapping[str, Episode], batch: int, rules: FateRules, surplus: str | None
) -> list[Fate]:
    if group.skipped:
        return [Fate(i, 0.0, 0, False, group.skipped, 0) for i in group.episode_ids]
    ages = {i: checked_age(episodes[i], batch, rules.max_staleness) for i in group.episode_ids if i in episodes}
    rewards = _rewards(group, episodes)
    reason = surplus or _group_reason(list(rewards.values()), rules.compares)
    if reason == ZERO_VARIANCE and rules.explores and rules.wanted is None:
        reason = None
    advantages = {} if reason else dict(zip(rewards, rules.advantages(list(rewards.values())), strict=True))
    return [_fate(i, episodes.get(i), ages.get(i, 0), advantages.get(i, 0.0), reason, rules) for i in group.episode_ids]


def _group_reason(rewards: list[float], compares: bool) -> str | None:
    if not compares:
        return None
    if len(rewards) < 2:
        return GROUP_TOO_SMALL
    return None if has_signal(rewards) else ZERO_VARIANCE


def _fate(
    episode_id: str, episode: Episode | None, age: int, advantage: float, reason: str | None, rules: FateRules
) -> Fate:
    if episode is None:
        return Fate(episode_id, 0.0, 0, False, DEADLINE, 0)
    if episode.reward is None:
        return Fate(episode_id, 0.0, age, False, GRADING_FAILED, 0)
    cut = episode.finish_reason == "length" and rules.truncated != "keep"
    masked = cut and rules.truncated == "mask"
    if reason is None and masked:
        reason = TRUNCATED
    counted = reason is None or (reason == ZERO_VARIANCE and rules.wanted is None)
    tokens = sum(episode.response_mask) if counted and not masked else 0
    return Fate(episode_id, 0.0 if cut or reason else advantage, age, reason is None, reason, tokens)


def checked_age(episode: Episode, batch: int, max_staleness: int) -> int:
    """Training steps between the version that sampled the episode and the version that step ``batch`` trains."""
    age = batch - episode.policy_version
    if not 0 <= age <= max_staleness:
        raise StalenessError(
            f"episode {episode.episode_id} was sampled by version {episode.policy_version}; training step {batch} "
            f"accepts versions {batch - max_staleness} to {batch} (max_staleness={max_staleness})"
        )
    return age
