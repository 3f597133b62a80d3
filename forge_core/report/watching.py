"""The state of a run that goes on, from the store alone.

Invariants:
- A look at a run that has not moved costs a handful of requests, however long the run is: what was read before is not
  read again, only the open batches are listed, and what is known of closed ones is forgotten.
- Ages are on the store's own clock. Clocks of two machines are never compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

from forge_core.config import ConfigError
from forge_core.config.sft_config import SftConfig
from forge_core.observability.alarms import Alarm, Alarms, first_trained, silence
from forge_core.observability.entries import STAGES, held_out
from forge_core.runs.early_end import EarlyEnd
from forge_core.runs.failures import Failure, failures
from forge_core.runs.liveness import Worker, state_of, workers
from forge_core.runs.record import load_run
from forge_core.store import Ledger, Store, layout
from forge_core.store.manifest import MANIFEST
from forge_core.store.store import READERS

WINDOW = 60  # newest steps that are shown
STOPPING_S = 30.0  # a run that is being stopped may finish objects for so long: what is made later, a resumed one made


@dataclass(frozen=True)
class Role:
    """``newest``: what it made last, ``age_s`` ago. ``open``: complete shards of the open batches, by batch."""

    name: str
    newest: str | None
    age_s: float | None
    open: Mapping[int, int]


@dataclass(frozen=True)
class State:
    """``version``: the newest committed one (-1: none yet) of ``steps``; ``word``: the run's state (``liveness``);
    ``stops``: requests to stop after which nobody has gone on; ``entries``: of the newest steps, in order;
    ``held_out``: version, mean reward and interval of the newest evaluation among them. ``alarms``: those of the newest
    steps. ``silent_s``: age of the newest object; None: the run has finished or was stopped."""

    version: int
    steps: int
    finished: bool
    word: str
    stops: int
    entries: list[dict[str, Any]]
    held_out: tuple[int, float, float, float] | None
    roles: list[Role]
    workers: list[Worker]
    failure: Failure | None
    alarms: list[Alarm]
    silent_s: float | None


class Watched:
    """One run to look at. Raises ConfigError for a run that does not exist or trains nothing."""

    def __init__(self, store: Store, run_id: str) -> None:
        self.store, self.record, self.run_id = store, load_run(store, run_id), run_id
        if self.record.flow == "rescore":
            raise ConfigError(
                f"run {run_id!r} grades stored episodes again: `forge ledger {run_id}` shows how far it is"
            )
        self._ledger = Ledger(store, run_id)
        self._early_end = EarlyEnd(self._ledger)
        self._entries: dict[int, dict[str, Any]] = {}
        self._first = cache(self._ledger.required)
        self._held_out: tuple[int, float, float, float] | None = None
        self._written: dict[str, float] = {}  # when the objects of the newest look were written: they never change
        self._before: dict[str, float] = {}  # and those of the one before
        self._failure: tuple[set[str], Failure | None] = (set(), None)

    def look(self) -> State:
        """The state now. Raises StoreError when the store does not answer."""
        if self.store.exists(layout.config_change(self.run_id, self.record.changes)):  # by a resume
            self.record = load_run(self.store, self.run_id)
        version = self._ledger.head()
        entries = self._newest(version)
        control = self._control()
        finished, roles = self._finished(version), list(self._roles(version))
        stops, silent_s = self._silence(control, finished, roles)
        found = workers(self.store, self.run_id)
        word = state_of(found, finished=finished, begun=version >= 0)
        return State(
            version, self.record.config.steps, finished, word, stops, entries[-WINDOW:], self._evaluated(entries),
            roles, found, self._newest_failure(control), self._alarms(version, entries, silent_s), silent_s,
        )  # fmt: skip

    def silence(self) -> tuple[int, float | None]:
        """``version`` and ``silent_s`` of the state, without the rest: no ledger entry is read."""
        version = self._ledger.head()
        finished, roles = self._finished(version), list(self._roles(version))
        return version, self._silence(self._control(), finished, roles)[1]

    def _control(self) -> list[str]:
        return self.store.list(f"{layout.run(self.run_id)}control")

    def _silence(self, control: list[str], finished: bool, roles: list[Role]) -> tuple[int, float | None]:
        """Requests to stop, and seconds since anything was made of a run that goes on."""
        age_s = self._since_newest(roles)
        stops = self._stops(control, age_s)
        return stops, None if finished or stops else age_s

    def _newest(self, version: int) -> list[dict[str, Any]]:
        """What is shown, and before it what alarms look at."""
        wanted = range(max(0, version - WINDOW - Alarms(self.record.config.alarms).needs), max(0, version))
        self._entries = {b: self._entries.get(b) or self._ledger.required(b) for b in wanted}
        return list(self._entries.values())

    def _evaluated(self, entries: list[dict[str, Any]]) -> tuple[int, float, float, float] | None:
        for found in held_out(entries)[-1:]:
            self._held_out = found
        return self._held_out

    def _finished(self, version: int) -> bool:
        config = self.record.config  # a supervised run may end before
        return version >= config.steps or (isinstance(config, SftConfig) and self._early_end.reached(config))

    def _since_newest(self, roles: list[Role]) -> float:
        """Seconds since anything of the run was made."""
        ages = [role.age_s for role in roles if role.age_s is not None]
        return min(ages) if ages else self._age(layout.run_json(self.run_id), self.store.now())

    def _stops(self, control: list[str], age_s: float) -> int:
        """Requests to stop, without those after which something was made: somebody has gone on with the run."""
        now = self.store.now()
        ages = [self._age(key, now) for key in control if "/control/stop-" in key]
        return sum(age < age_s + STOPPING_S for age in ages)

    def _alarms(self, version: int, entries: list[dict[str, Any]], silent_s: float | None) -> list[Alarm]:
        """What the newest steps raise, and whether the run is silent."""
        section = self.record.config.alarms
        rules = Alarms(section)
        for entry in first_trained(self._first, max(0, version - len(entries))):
            rules.after(entry)
        found = [a for entry in entries for a in rules.after(entry) if a.step > version - WINDOW]
        limit_s = None if section.silent_minutes is None else 60.0 * section.silent_minutes
        if limit_s is not None and silent_s is not None and silent_s > limit_s:
            at = datetime.fromtimestamp(self.store.now(), UTC).isoformat(timespec="milliseconds")
            found.append(silence(max(0, version), at, silent_s, limit_s))
        return found

    def _roles(self, version: int) -> Iterator[Role]:
        now, first = self.store.now(), max(0, version)
        self._before, self._written = self._written, {}
        if not isinstance(self.record.config, SftConfig):
            open_ = self.record.config.max_staleness + 1
            batches = range(max(0, first - 1), min(self.record.config.steps, first + open_))
            for kind, name in STAGES.items():
                if kind != "reference" or self.record.config.grpo.beta:
                    yield self._role(kind, name, batches, first, now)
        key = layout.ledger(self.run_id, version - 1) if version > 0 else layout.ledger_init(self.run_id)
        newest = f"version {version}" if version >= 0 else None
        yield Role("trainer", newest, self._age(key, now) if newest else None, {})

    def _role(self, kind: str, name: str, batches: range, first: int, now: float) -> Role:
        """Of a stage whose objects are shards. Batches that are committed are listed for what was made last."""
        found: dict[int, list[str]] = {}
        for batch in batches:
            keys = self.store.list(f"{layout.run(self.run_id)}{kind}/{layout.number(batch)}")
            found[batch] = [key for key in keys if key.endswith(f"/{MANIFEST}")]
        open_ = {batch: len(keys) for batch, keys in found.items() if batch >= first and keys}
        made = [key for keys in found.values() for key in keys]
        if not made:
            return Role(name, None, None, open_)
        with ThreadPoolExecutor(READERS) as pool:
            age_s, batch = min(pool.map(lambda key: (self._age(key, now), -int(key.split("/")[-3])), made))
        return Role(name, f"batch {-batch}", age_s, open_)

    def _age(self, key: str, now: float) -> float:
        if key not in self._written:
            self._written[key] = self._before[key] if key in self._before else self.store.written_at(key)
        return max(0.0, now - self._written[key])

    def _newest_failure(self, control: list[str]) -> Failure | None:
        keys = {key for key in control if "/control/failure-" in key}
        if keys != self._failure[0]:
            self._failure = (keys, failures(self.store, keys)[-1])
        return self._failure[1]
