"""The alarms of a run, found again from its store.

Invariant: those of steps are what was raised while it went on, with the newest thresholds. A silence is known by the
objects around it: two commits of one process, and the shards in between; what a crash left is no silence of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from forge_core.observability.alarms import Alarm, AnyAlarms, alarm_section, alarms_of, longest_gap, silence
from forge_core.observability.entries import STAGES, seconds
from forge_core.report.facts import Facts


def alarms(facts: Facts) -> list[Alarm]:
    """By training step. None of a run that grades again."""
    if facts.flow == "rescore":
        return []
    return facts.tried("alarms", lambda: _raised(facts)) or []


def _raised(facts: Facts) -> list[Alarm]:
    section = alarm_section(facts.config, supervised=facts.supervised)
    found = [*alarms_of(section, facts.entries), *_silences(facts, section)]
    return sorted(found, key=lambda alarm: alarm.step)


def _silences(facts: Facts, section: AnyAlarms) -> Iterator[Alarm]:
    if section.silent_minutes is None:
        return
    limit_s = 60.0 * section.silent_minutes
    for before, entry in pairwise(facts.entries):
        begin, end = seconds(before["finished_at"]), seconds(entry["finished_at"])
        if before.get("attempt") == entry.get("attempt") and end - begin > limit_s:
            between = [at for at in _finished(facts, entry["batch"]) if begin < at < end]
            if (silent_s := longest_gap([begin, *between, end])) > limit_s:
                yield silence(entry["version_out"], entry["finished_at"], silent_s, limit_s)


def _finished(facts: Facts, batch: int) -> list[float]:
    """When the shards were finished that may be made while ``batch`` is trained, in seconds since 1970."""
    open_ = range(batch, batch + 1 + facts.config.get("max_staleness", 0))
    stages = [facts.published(kind) for kind in STAGES]
    prefixes = [prefix for found in stages for one in open_ for prefix in found.get(one, [])]
    made = facts.all_of(prefixes, lambda prefix: dict(facts.store.open_published(prefix).manifest.provenance))
    return [found["finished_at_s"] for found in made if found and "finished_at_s" in found]
