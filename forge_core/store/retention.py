"""Retention is reachability: what nothing can need any more is deleted, no sooner than a grace period later.

Reachable, and never deleted:
- the ``keep_checkpoints`` (two at least) newest complete checkpoints of the chain;
- weights of version 0 (reference model, and resume without a checkpoint), of versions that open batches may sample
  (``>= last committed + 1 - staleness``), of the ``keep_weights`` newest, and whatever the caller pins (the best
  version, registry aliases);
- what an unfinished step has published but not committed yet;
- training tables that the ledger names. Plans, episodes, rewards and reference log-probabilities are never deleted
  here: they are the product of the run.

Everything else under ``weights/``, ``checkpoints/`` and ``training/`` is garbage: superseded objects, and those of
attempts that lost. The collector that first finds an object unreachable leaves a tombstone; a collector that finds it
so ``grace_s`` later deletes it, manifest first, so that a half deleted object is no object. So a reader that found an
object in the ledger has ``grace_s`` to read it. The age of a tombstone is measured on the store's own clock: those of
the collectors' machines may be wrong by any time. A tombstone says whether the ledger had named the object, since one
that was not committed yet may still be reached later; then its grace starts anew.

Weights may be pinned at any moment. A collector first says which it is about to delete (``layout.deleting``), then asks
once more what is pinned; whoever pins weights looks for that word afterwards. One of the two sees the other. A word
counts for ``WORD_S``: that of a collector which died before it took it back goes with the first collection after that.

Versions that a run evaluates are within reach by themselves: that lasts no longer than they may sample.
"""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from forge_core.store import layout
from forge_core.store.checkpoints import complete_checkpoints, prefix_number
from forge_core.store.deletion import Garbage, delete_objects
from forge_core.store.errors import NotFound, StoreError
from forge_core.store.ledger import Ledger
from forge_core.store.store import Store

KINDS = ("weights", "checkpoints", "training")
GRAVE = (".named.json", ".unnamed.json")
WORD_S = 3600.0  # a collector whose word is older than this has died


@dataclass(frozen=True)
class Collected:
    """``garbage`` was deleted (or would be); ``waiting`` are prefixes that are unreachable, but within the grace."""

    garbage: tuple[Garbage, ...]
    waiting: tuple[str, ...]

    @property
    def prefixes(self) -> tuple[str, ...]:
        return tuple(garbage.name for garbage in self.garbage)


def collect(
    store: Store,
    run_id: str,
    *,
    staleness: int,
    keep_weights: int,
    keep_checkpoints: int,
    grace_s: float,
    pinned: Callable[[], Collection[str]] = tuple,
    dry_run: bool = False,
) -> Collected:
    """Delete what has been unreachable for ``grace_s`` seconds; with ``dry_run`` only say what that is.

    ``pinned`` gives weights prefixes to keep besides the roots. Raises ValueError when less than the roots would stay.
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
    kept = reach.reachable(objects) | set(pinned())
    graves = _Graves(store, run_id)
    unreachable = sorted(objects.keys() - kept)
    due = [prefix for prefix in unreachable if graves.age(prefix, reach.named(prefix)) >= grace_s]
    waiting = tuple(prefix for prefix in unreachable if prefix not in set(due))
    if not dry_run:
        due = _delete(store, {prefix: objects[prefix] for prefix in due}, pinned)
        # Last: a full store takes no tombstones, but what is due makes room.
        graves.update({prefix: reach.named(prefix) for prefix in waiting})
        graves.forget_words()
    return Collected(tuple(Garbage(prefix, objects[prefix]) for prefix in due), waiting)


def _delete(store: Store, due: Mapping[str, dict[str, int]], pinned: Callable[[], Collection[str]]) -> list[str]:
    """Delete the objects ``due`` (keys by prefix), but for those that have been pinned since; the prefixes deleted."""
    weights = [prefix for prefix in due if _place(prefix)[0] == "weights"]
    own = uuid.uuid4().hex[:8]  # another collector's word is not this one's to take back
    with suppress(StoreError):  # a store too full for a word takes no promotion either
        for prefix in weights:
            store.put_json(layout.deleting(prefix, own), {"prefix": prefix})
    spared = set(pinned()) if weights else set()
    deleted = [prefix for prefix in due if prefix not in spared]
    for prefix in deleted:
        delete_objects(store, due[prefix])
    for prefix in weights:
        store.delete(layout.deleting(prefix, own))
    return deleted


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
    """Tombstones: ``gc/<kind>-<number>-<attempt>.<named|unnamed>.json`` was written when the object was first found
    unreachable. The collectors' words lie beside them."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        keys = store.list(f"{layout.run(run_id)}gc")
        self._keys = {key for key in keys if key.endswith(GRAVE)}
        self._words = [key for key in keys if layout.DELETING in key]
        self._now = store.now()

    def age(self, prefix: str, named: bool) -> float:
        """For how long ``prefix`` has been unreachable in this state: 0 when this is the first time."""
        key = self._key(prefix, named)
        return self._since(key) if key in self._keys else 0.0

    def forget_words(self) -> None:
        """Delete the words of collectors that have died."""
        for key in self._words:
            if self._since(key) >= WORD_S:
                self._store.delete(key)

    def _since(self, key: str) -> float:
        try:
            return self._now - self._store.written_at(key)
        except NotFound:
            return 0.0  # another collector has closed it

    def update(self, waiting: Mapping[str, bool]) -> None:
        """Note that the prefixes ``waiting`` are unreachable (and whether named), where that is not noted; forget what
        was noted about others: they are reachable again, or deleted."""
        wanted = {self._key(prefix, named): prefix for prefix, named in waiting.items()}
        for key in wanted.keys() - self._keys:
            self._store.put_new_json(key, {"prefix": wanted[key]})
        for key in self._keys - wanted.keys():
            self._store.delete(key)

    def _key(self, prefix: str, named: bool) -> str:
        kind, name = prefix.removeprefix(layout.run(self._run_id)).rstrip("/").split("/")
        return layout.tombstone(self._run_id, f"{kind}-{name}.{'named' if named else 'unnamed'}")


def _objects(store: Store, run_id: str) -> dict[str, dict[str, int]]:
    """Prefix -> keys with sizes of everything that may be deleted, complete or not."""
    objects: dict[str, dict[str, int]] = defaultdict(dict)
    for kind in KINDS:
        folder = f"{layout.run(run_id)}{kind}/"
        for key, size in store.sizes(folder).items():
            objects[folder + key.removeprefix(folder).partition("/")[0] + "/"][key] = size
    return dict(objects)


def _place(prefix: str) -> tuple[str, int]:
    """Kind and number of ``runs/<run_id>/<kind>/<number>-<attempt>/``."""
    return prefix.split("/")[2], prefix_number(prefix)
