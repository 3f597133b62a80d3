"""Alarms: what a person should look at in a run that goes on.

Invariants:
- What is raised after a step is a pure function of the thresholds and of the ledger entries so far, so it can be found
  again at any time from the store. A step costs microseconds and memory is bounded.
- An alarm stops nothing. It is raised when it begins to hold, and again only after ``REST`` steps without it.
- A step that had nothing to train says nothing of entropy, KL or mismatch: its entry has zeros there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf
from statistics import fmean, median
from typing import Any, NamedTuple

from forge_core.config.alarm_sections import AlarmSection, AnyAlarms, SftAlarmSection

Entry = Mapping[str, Any]
Metrics = Mapping[str, float]
FIRST, ROW, REST = 5, 3, 20  # steps: that entropy is compared with, that make an alarm, between two of one kind
LOWEST_OF = 100  # newest steps, whose lowest loss is what it rises from: a run that goes on reads no more than these
FREE, STORED, WEIGHTS = "time/store_free_bytes", "time/store_bytes", "weights/bytes"
GIB = 2**30
SILENT = "silent"


@dataclass(frozen=True)
class Alarm:
    """``step``: how many training steps were committed when it was raised, at ``at`` (ISO 8601): the newest policy
    version. ``value`` is on the wrong side of ``limit``."""

    name: str
    step: int
    at: str
    message: str
    value: float
    limit: float

    def payload(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass
class History:
    """The metrics that rules look at: of the first steps that trained, of the newest ``ROW`` of these, and of the
    newest steps of whatever kind. ``losses``: of those of the newest steps that trained; infinite for the others."""

    first: list[Metrics]
    trained: deque[Metrics]
    newest: deque[Metrics]
    losses: deque[float]

    def add(self, metrics: Metrics, trained: bool) -> None:
        self.newest.append(metrics)
        if trained:
            self.trained.append(metrics)
            self.first += [metrics] if len(self.first) < FIRST else []
        self.losses.append(metrics.get("loss", inf) if trained else inf)

    def forget(self) -> None:
        """Steps were left out: what is known of the newest ones is not in a row with the next."""
        for steps in (self.trained, self.newest, self.losses):
            steps.clear()


def first_trained(read: Callable[[int], Entry], before: int) -> Iterator[Entry]:
    """The entries of a run from its start, until ``FIRST`` have trained, or up to batch ``before``."""
    trained = 0
    for batch in range(before):
        if trained == FIRST:
            return
        entry = read(batch)
        trained += entry["episodes"]["trained"] > 0
        yield entry


class Found(NamedTuple):
    """An alarm that holds."""

    message: str
    value: float
    limit: float


class Alarms:
    """The alarms of one run, step by step: feed it every entry, in order. Of a run that goes on, those of
    ``first_trained`` and the newest ``needs`` ones will do."""

    def __init__(self, section: AnyAlarms) -> None:
        self._section = section
        window = (section.flat_reward or ROW) if isinstance(section, AlarmSection) else LOWEST_OF
        self.needs = window + REST
        self._seen = History([], deque(maxlen=ROW), deque(maxlen=window), deque(maxlen=window))
        self._rules = {**RULES, **(GRPO_RULES if isinstance(section, AlarmSection) else SFT_RULES)}
        self._held: dict[str, int] = {}  # the newest step at which an alarm held, by its name
        self._next = 0

    def after(self, entry: Entry) -> list[Alarm]:
        """The alarms that the step of ``entry`` raises."""
        step = entry["batch"]
        if step != self._next:
            self._seen.forget()
        self._next = step + 1
        self._seen.add(entry["metrics"], entry["episodes"]["trained"] > 0)
        holding = [(name, rule(self._section, self._seen)) for name, rule in self._rules.items()]
        return [
            Alarm(name, entry["version_out"], entry["finished_at"], *found)
            for name, found in holding
            if found is not None and self._is_new(name, step)
        ]

    def _is_new(self, name: str, step: int) -> bool:
        """Whether an alarm that holds now is more than the continuation of the last one."""
        before, self._held[name] = self._held.get(name), step
        return before is None or step - before > REST


def flat_reward(section: AlarmSection, seen: History) -> Found | None:
    """The mean reward of the newest steps is no better than that of as many before."""
    rewards, half = _values(seen.newest, "reward/mean"), (section.flat_reward or 0) // 2
    if section.flat_reward is None or len(rewards) < 2 * half:
        return None
    before, now = fmean(rewards[-2 * half : -half]), fmean(rewards[-half:])
    needed = section.flat_reward_gain * fmean(_values(seen.newest, "reward/std") or [0.0])
    if now - before > needed:
        return None
    text = f"the reward is flat: {now:.3f} in the newest {half} steps, {before:.3f} in the {half} before"
    return Found(text, now - before, needed)


def entropy_collapse(section: AlarmSection, seen: History) -> Found | None:
    """The entropy is next to nothing, against what it was in the first steps."""
    first, newest = _values(seen.first, "entropy"), _values(seen.trained, "entropy")
    if section.entropy is None or len(first) < FIRST or len(newest) < ROW:
        return None
    limit, value = section.entropy * median(first), max(newest)
    if value >= limit:
        return None
    text = f"the entropy has collapsed: {value:.2g} nats per token, {median(first):.2g} in the first steps"
    return Found(text, value, limit)


def kl(section: AlarmSection, seen: History) -> Found | None:
    """The policy runs away from the reference model."""
    return _above(seen, "kl", section.kl, "the KL to the reference model is {:.3g} nats per token")


def mismatch(section: AlarmSection, seen: History) -> Found | None:
    """Sampler and trainer disagree on what was sampled."""
    text = "log-probabilities of sampler and trainer differ by {:.3g} nats per token"
    return _above(seen, "mismatch/one_version_mean_abs_logprob", section.mismatch, text)


def loss_rise(section: SftAlarmSection, seen: History) -> Found | None:
    """The training loss goes up again."""
    lowest = min(seen.losses)
    limit = None if section.loss_rise is None else lowest + section.loss_rise
    text = f"the training loss has risen to {{:.3g}} nats per token; the lowest in {LOWEST_OF} steps was {lowest:.3g}"
    return _above(seen, "loss", limit, text)


def disk_full(section: AnyAlarms, seen: History) -> Found | None:
    """The file system of the store has little room."""
    newest, versions = seen.newest[-1], section.disk_versions
    if versions is None or FREE not in newest or WEIGHTS not in newest:
        return None
    limit, value = versions * newest[WEIGHTS], newest[FREE]
    if value >= limit:
        return None
    text = f"the store's disk is nearly full: {value / GIB:.3g} GiB are free, {versions:g} versions of the weights take"
    return Found(f"{text} {limit / GIB:.3g} GiB", value, limit)


def bucket_full(section: AnyAlarms, seen: History) -> Found | None:
    """The bucket is as full as its owner wants it to get."""
    limit, value = section.bucket_gib, seen.newest[-1].get(STORED, 0.0) / GIB
    if limit is None or value < limit:
        return None
    return Found(f"the bucket is nearly full: it holds {value:.3g} GiB, limit {limit:g} GiB", value, limit)


Rule = Callable[[Any, History], Found | None]
RULES: dict[str, Rule] = {"disk_full": disk_full, "bucket_full": bucket_full}
GRPO_RULES: dict[str, Rule] = {
    "flat_reward": flat_reward,
    "entropy_collapse": entropy_collapse,
    "kl": kl,
    "mismatch": mismatch,
}
SFT_RULES: dict[str, Rule] = {"loss_rise": loss_rise}


def alarms_of(section: AnyAlarms, entries: Iterable[Entry]) -> list[Alarm]:
    """All alarms of a run, in order."""
    rules = Alarms(section)
    return [alarm for entry in entries for alarm in rules.after(entry)]


def alarm_section(config: Mapping[str, Any], *, supervised: bool) -> AnyAlarms:
    """The thresholds of a stored configuration, also of one from before there were alarms. Raises ValueError."""
    return (SftAlarmSection if supervised else AlarmSection).model_validate(config.get("alarms", {}))


def silence(step: int, at: str, silent_s: float, limit_s: float) -> Alarm:
    """The alarm of a run of which nothing new has been stored for ``silent_s`` seconds, after ``step`` steps."""
    message = f"no new object for {silent_s / 60:.0f} minutes, limit {limit_s / 60:g} minutes"
    return Alarm(SILENT, step, at, message, silent_s, limit_s)


def longest_gap(times: Sequence[float]) -> float:
    """The longest time between two of ``times`` (seconds) that follow each other."""
    return max((b - a for a, b in pairwise(sorted(times))), default=0.0)


def _above(seen: History, key: str, limit: float | None, text: str) -> Found | None:
    """Whether the metric is above ``limit`` in each of the newest ``ROW`` steps that trained."""
    newest = _values(seen.trained, key)
    if limit is None or len(newest) < ROW or min(newest) <= limit:
        return None
    return Found(f"{text.format(newest[-1])}, above {limit:.3g} in {ROW} steps in a row", newest[-1], limit)


def _values(steps: Iterable[Metrics], key: str) -> list[float]:
    return [step[key] for step in steps if step.get(key) is not None]
