"""What the store says of one run, however far it came.

Invariants:
- Only what nothing can be said without (the run's name) is an error. Everything else that is missing, torn or damaged
  is named in ``problems``, and the rest is shown.
- Objects are read through their manifests, so nothing damaged is ever shown as if it were whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from forge_core.config import ConfigError
from forge_core.config.sft_config import SftConfig
from forge_core.runs.early_end import ends_early, validation_losses
from forge_core.runs.failures import Failure, failures
from forge_core.runs.formats import SFT
from forge_core.runs.liveness import Worker, state_of, workers
from forge_core.runs.record import RUN_ID
from forge_core.store import Store, StoreError, layout
from forge_core.store.manifest import MANIFEST
from forge_core.store.store import READERS

Entry = dict[str, Any]
T = TypeVar("T")
UNREADABLE = (StoreError, OSError, ValueError, KeyError, TypeError)  # a damaged object raises what its reader does


@dataclass
class Facts:
    """``sizes``: of every object of the run, by key. ``config``: the newest, as stored. ``entries``: the committed
    steps that can be read, in order."""

    store: Store
    run_id: str
    sizes: dict[str, int]
    about: Entry = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def flow(self) -> str:
        return str(self.about.get("flow", "grpo"))

    @property
    def supervised(self) -> bool:
        return self.flow == SFT

    @property
    def steps(self) -> int | None:
        """How many steps the run is to take, where that is known."""
        return self.config.get("steps")

    @property
    def state(self) -> str:
        """In a word, as ``forge runs`` says it."""
        done = self.steps is not None and len(self.entries) >= self.steps
        return state_of(self.workers, finished=done or self._ended_early, begun=bool(self.entries))

    @property
    def _ended_early(self) -> bool:
        if not self.supervised or (self.config.get("validation") or {}).get("patience") is None:
            return False
        losses = validation_losses(self.entries)
        return bool(self.tried("validation", lambda: ends_early(SftConfig.model_validate(self.config), losses)))

    def tried(self, what: str, read: Callable[[], T]) -> T | None:
        """What ``read`` gives; None, and a problem, where it cannot be read."""
        try:
            return read()
        except UNREADABLE as error:
            text = str(error)
            self.problems.append(text if what in text else f"{what}: {text or type(error).__name__}")
            return None

    def all_of(self, keys: Sequence[str], read: Callable[[str], T]) -> list[T | None]:
        """``tried`` of many keys, side by side, in their order."""
        with ThreadPoolExecutor(READERS) as pool:
            return list(pool.map(lambda key: self.tried(key, lambda: read(key)), keys))

    def published(self, kind: str) -> dict[int, list[str]]:
        """Prefixes of the complete objects of ``kind`` (episodes, rewards, reference), by batch, in plan order."""
        found: dict[int, list[str]] = {}
        start = f"{layout.run(self.run_id)}{kind}/"
        for key in self.sizes:
            if key.startswith(start) and key.endswith(f"/{MANIFEST}"):
                found.setdefault(int(key[len(start) :].partition("/")[0]), []).append(key.removesuffix(MANIFEST))
        return found


def collect(store: Store, run_id: str) -> Facts:
    """Everything but samples and times of shards. Raises ConfigError for a run of which nothing is stored."""
    if not re.fullmatch(RUN_ID, run_id):
        raise ConfigError(
            f"run {run_id!r}: a run id is up to 100 letters, digits and any of . _ -, the first a letter or digit"
        )
    sizes = store.sizes(layout.run(run_id))
    if not sizes:
        raise ConfigError(f"run {run_id!r} does not exist in {store.uri}: `forge runs` lists those that do")
    facts = Facts(store, run_id, sizes)
    _read_configuration(facts)
    _read_entries(facts)
    facts.failures = facts.tried("failures", lambda: failures(store, sizes)) or []
    facts.workers = facts.tried("workers", lambda: workers(store, run_id)) or []
    facts.problems += _missing(facts)
    return facts


def _read_configuration(facts: Facts) -> None:
    """As plain values, so that runs of other releases are shown too."""
    changes = (layout.config_change(facts.run_id, n) for n in range(len(facts.sizes)))
    keys = [layout.run_json(facts.run_id)]
    for key in changes:
        if key not in facts.sizes:
            break
        keys.append(key)
    bodies = facts.all_of(keys, facts.store.read_json)
    facts.about = bodies[0] or {}
    facts.config = next((body["config"] for body in reversed(bodies) if body and "config" in body), {})


def _read_entries(facts: Facts) -> None:
    folder = layout.rescored_folder(facts.run_id) if facts.flow == "rescore" else f"{layout.run(facts.run_id)}ledger/"
    keys = [key for key in facts.sizes if re.fullmatch(r"\d{8}\.json", key.removeprefix(folder))]
    batches = [int(key[-13:-5]) for key in keys]
    if gaps := sorted(set(range(max(batches, default=-1) + 1)) - set(batches)):
        facts.problems.append(f"{folder}{gaps[0]:08d}.json is missing, but later steps are committed")
    found = facts.all_of(keys, lambda key: _entry(facts.store.read_json(key)))
    facts.entries = [entry for entry in found if entry is not None]


def _entry(body: Entry) -> Entry:
    """``body`` where it has what every picture needs; KeyError names what it lacks."""
    batch = body["batch"]
    return {"version_in": batch, "version_out": batch + 1, "started_at": body["finished_at"], **body,
            "metrics": dict(body["metrics"])}  # fmt: skip


def _missing(facts: Facts) -> Iterable[str]:
    """Objects that a committed step names and that are not there, or not whole."""
    files: Counter[str] = Counter(
        key.rpartition("/")[0] + "/" for key in facts.sizes if not key.endswith(f"/{MANIFEST}")
    )
    for entry in facts.entries:
        for prefix in _named(entry):
            if prefix + MANIFEST not in facts.sizes:
                yield f"{prefix} is missing (step {entry['batch']} was trained with it)"
            elif not files[prefix]:
                yield f"{prefix} has a manifest, but none of its files (step {entry['batch']} was trained with it)"


def _named(entry: Mapping[str, Any]) -> Iterable[str]:
    for prefixes in entry.get("shards", {}).values():
        yield from prefixes
    if entry.get("training"):  # a supervised step has none
        yield entry["training"]
