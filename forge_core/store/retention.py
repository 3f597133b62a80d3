"""Retention is reachability: what nothing can need any more is deleted, no sooner than a grace period later.

Reachable, and never deleted:
- the ``keep_checkpoints`` (two at least) newest complete checkpoints of the chain;
- weights of version 0 (reference model, and resume without a checkpoint), of versions that open batches may sample
  (``>= last committed + 1 - staleness``), of the ``keep_weights`` newest, and whatever the caller pins (unfinished
  evaluations, registry aliases);
- what an unfinished step has published but not committed yet;
- training tables that the ledger names. Plans, episodes, rewards and reference log-probabilities are never deleted
  here: they are the product of the run.

Everything else under ``weights/``, ``checkpoints/`` and ``training/`` is garbage: superseded objects, and those of
attempts that lost. The collector that first finds an object unreachable leaves a tombstone with the time; a collector
that finds it so ``grace_s`` later deletes it, manifest first, so that a half deleted object is no object. The clock is
thus the collector's alone. A tombstone says whether the ledger had named the object, since an object that was not
committed yet may still be reached later; then its grace starts anew.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from forge_core.store import layout
from forge_core.store.checkpoints import complete_checkpoints, prefix_number
from forge_core.store.ledger import Ledger
from forge_core.store.manifest import MANIFEST
from forge_core.store.store import Store

KINDS = ("weights", "checkpoints", "training")


@dataclass(frozen=True)
class Deleted:
    """``prefixes`` were deleted, ``files`` objects in all; ``waiting`` are unreachable but within the grace period."""

    prefixes: tuple[str, ...]
    files: int
    waiting: tuple[str, ...]


def collect(
    store: Store,
    run_id: str,
    *,
    staleness: int,
    keep_weights: int,
    keep_checkpoints: int,
    grace_s: float,
    now: float,
    pinned: Collection[str] = (),
) -> Deleted:
    """Delete what has been unreachable for ``grace_s`` seconds at time ``now`` (seconds, any one clock).

    ``pinned`` are weights prefixes to keep besides the roots. Raises ValueError when less than the roots would stay.
    """
    for setting, value, least in (
        ("checkpoint.keep", keep_checkpoints, 2),
        ("weights.keep", keep_weights, 1),
        ("max_staleness", staleness, 0),
        ("gc.grace", grace_s, 0),
    ):
        if value < least:
            raise ValueError(f"{setting} is {value}: a run that can be resumed needs {least} at least")
    reach = _Reach(store, run_id, staleness, keep_weights, keep_checkpoints)
    objects = _objects(store, run_id)
    kept = reach.reachable(objects) | set(pinned)
    graves = _Graves(store, run_id)
    graves.close(objects.keys() & kept)
    unreachable = sorted(objects.keys() - kept)
    due = {prefix for prefix in unreachable if now - graves.since(prefix, reach.named(prefix), now) >= grace_s}
    for prefix in sorted(due):
        _delete(store, objects[prefix])
    graves.close(due)
    waiting = tuple(prefix for prefix in unreachable if prefix not in due)
    return Deleted(tuple(sorted(due)), sum(len(objects[prefix]) for prefix in due), waiting)


class _Reach:
    """What the ledger and the checkpoints reach, read once, before anything is listed for deletion."""

    def __init__(self, store: Store, run_id: str, staleness: int, keep_weights: int, keep_checkpoints: int) -> None:
        self._ledger = Ledger(store, run_id)
        self._head = self._ledger.head()
        self._checkpoints = complete_checkpoints(store, run_id)
        self._kept_checkpoints = {checkpoint.prefix for checkpoint in self._checkpoints[-keep_checkpoints:]}
        oldest = max(0, min(self._head - staleness, self._head - keep_weights + 1))
        versions = {0, *range(oldest, self._head + 1)} if self._head >= 0 else set()
        self._weights = {self._ledger.weights_prefix(version) for version in versions}

    def reachable(self, prefixes: Iterable[str]) -> set[str]:
        """Those of ``prefixes`` that something reaches."""
        prefixes = list(prefixes)
        tries = Counter(_place(prefix) for prefix in prefixes)
        return {prefix for prefix in prefixes if self._reaches(prefix, sole=tries[_place(prefix)] == 1)}

    def named(self, prefix: str) -> bool:
        """Whether the ledger, or the chain of checkpoints, has this object, superseded or not."""
        kind, number = _place(prefix)
        if kind == "checkpoints":
            return any(checkpoint.prefix == prefix for checkpoint in self._checkpoints)
        batch = number - 1 if kind == "weights" else number
        entry = self._ledger.entry(batch) if batch >= 0 else self._ledger.init()
        return entry is not None and entry[kind] == prefix

    def _reaches(self, prefix: str, sole: bool) -> bool:
        kind, number = _place(prefix)
        if kind == "weights":
            return prefix in self._weights or number > self._head
        if kind == "checkpoints":
            newest = self._checkpoints[-1].batch if self._checkpoints else -1
            return prefix in self._kept_checkpoints or number > newest
        # A committed step has its table: where there was one try only, it is the one that the entry names.
        return number >= self._head or sole or self.named(prefix)


class _Graves:
    """Tombstones: ``gc/<kind>-<number>-<attempt>.<named|unnamed>.json`` says when the object was first unreachable."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._keys = set(store.list(f"{layout.run(run_id)}gc"))

    def since(self, prefix: str, named: bool, now: float) -> float:
        """When ``prefix`` was first found unreachable in this state: ``now`` when this is the first time."""
        key = self._key(prefix, named)
        if key not in self._keys:
            self._store.put_new_json(key, {"prefix": prefix, "seen_at": now})
            self._keys.add(key)
        return self._store.read_json(key)["seen_at"]

    def close(self, prefixes: Iterable[str]) -> None:
        """Forget what was noted about ``prefixes``: they are reachable again, or deleted."""
        for prefix in prefixes:
            for key in {self._key(prefix, named) for named in (True, False)} & self._keys:
                self._store.delete(key)
                self._keys.discard(key)

    def _key(self, prefix: str, named: bool) -> str:
        kind, name = prefix.removeprefix(layout.run(self._run_id)).rstrip("/").split("/")
        return layout.tombstone(self._run_id, f"{kind}-{name}.{'named' if named else 'unnamed'}")


def _objects(store: Store, run_id: str) -> dict[str, list[str]]:
    """Prefix -> keys of everything that may be deleted, complete or not."""
    objects: dict[str, list[str]] = defaultdict(list)
    for kind in KINDS:
        folder = f"{layout.run(run_id)}{kind}/"
        for key in store.list(folder):
            objects[folder + key.removeprefix(folder).partition("/")[0] + "/"].append(key)
    return dict(objects)


def _place(prefix: str) -> tuple[str, int]:
    """Kind and number of ``runs/<run_id>/<kind>/<number>-<attempt>/``."""
    return prefix.split("/")[2], prefix_number(prefix)


def _delete(store: Store, keys: list[str]) -> None:
    manifests = [key for key in keys if key.endswith(f"/{MANIFEST}")]
    for key in [*manifests, *(key for key in keys if key not in set(manifests))]:
        store.delete(key)
