"""The ledger of a run: only the ledger makes a version exist.

- ``ledger/init.json`` commits version 0, ``ledger/<batch>.json`` commits training step ``batch`` and with it version
  ``batch + 1``. Both by ``put_new``: of two trainers that commit one step, one wins.
- Entries are contiguous from 0 and form a chain: ``previous`` is ``entry_digest`` of the entry before.
- The head is found by looking up single entries, never by a listing: it costs O(log of the entries added since the
  last call) look-ups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from forge_core.store import layout
from forge_core.store.digests import digest
from forge_core.store.errors import LedgerError, NotFound
from forge_core.store.numbering import newest
from forge_core.store.store import Store

Entry = dict[str, Any]

INIT_KEYS = frozenset(
    ("version", "weights", "weights_digest", "state_digest", "model", "started_at", "finished_at", "metrics")
)
ENTRY_KEYS = frozenset(
    (
        *("batch", "version_in", "version_out", "max_age", "episodes", "tokens", "plans", "shards"),
        *("training", "training_digest", "weights", "weights_digest", "attempt", "previous", "state_digest"),
        *("cursor", "metrics", "started_at", "finished_at"),
    )
)
EPISODE_KEYS = frozenset(("planned", "trained", "dropped"))
SHARD_KEYS = frozenset(("episodes", "rewards", "reference"))
_UNDECIDED = ("started_at", "finished_at", "attempt", "recorded")
_ATTEMPT = re.compile(r"(/\d{8})-[^/]+/$")


def entry_digest(entry: Mapping[str, Any]) -> str:
    """Digest of what ``entry`` decided.

    Left out is what may differ between two equal runs: the times, ``attempt``, the attempt's part of the prefixes
    ``weights``, ``training`` and ``adapter``, metrics whose name begins with ``time/``, and what code ``recorded``. So
    equal runs have equal chains.
    """
    decided = {key: value for key, value in entry.items() if key not in _UNDECIDED}
    for key in ("weights", "training", "adapter"):
        if key in decided:
            decided[key] = _ATTEMPT.sub(r"\1/", decided[key])
    decided["metrics"] = {key: value for key, value in entry["metrics"].items() if not key.startswith("time/")}
    return digest(decided)


class Ledger:
    """The ledger of ``run_id``. May be used from many threads."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._known = -1  # a version that is known to exist

    def init(self) -> Entry | None:
        """The entry of version 0, if it is committed."""
        return self._read(layout.ledger_init(self._run_id))

    def entry(self, batch: int) -> Entry | None:
        """The entry of training step ``batch``, if it is committed."""
        return self._read(layout.ledger(self._run_id, batch))

    def previous(self, batch: int) -> str:
        """What entry ``batch`` must carry as ``previous``. Raises LedgerError when the entry before is missing."""
        return entry_digest(self.required(batch - 1))

    def commit_init(self, entry: Mapping[str, Any]) -> bool:
        """Commit version 0. False: another writer had committed it. Raises LedgerError on missing keys."""
        key = layout.ledger_init(self._run_id)
        _require(key, entry, INIT_KEYS)
        if entry["version"] != 0:
            raise LedgerError(f"{key}: version is {entry['version']}, must be 0")
        return self._store.put_new_json(key, entry)

    def commit(self, entry: Mapping[str, Any]) -> bool:
        """Commit a training step. False: another trainer had committed it. Raises LedgerError when ``entry`` lacks
        keys, does not add up, or does not continue the chain."""
        check_entry(layout.ledger(self._run_id, entry["batch"]), entry)
        self._check_previous(entry)
        return self._store.put_new_json(layout.ledger(self._run_id, entry["batch"]), entry)

    def head(self) -> int:
        """The newest committed version: -1 without any, 0 after ``init``, ``batch + 1`` after entry ``batch``."""
        if self._known < 0 and not self._store.exists(layout.ledger_init(self._run_id)):
            return -1
        self._known = newest(self._committed, max(self._known, 0))
        return self._known

    def entries(self) -> list[Entry]:
        """All committed training steps in order."""
        return [self.required(batch) for batch in range(self.head())]

    def weights_prefix(self, version: int) -> str:
        """Where the weights of a committed version are. Raises LedgerError when it is not committed."""
        return self.required(version - 1)["weights"]

    def verify(self) -> int:
        """Check every entry and the chain; return the head. Raises LedgerError that names the first bad entry.

        An audit: it lists the ledger, to find entries after a gap."""
        batches = _batches(self._store.list(f"{layout.run(self._run_id)}ledger"))
        if batches != list(range(len(batches))):
            missing = next(expected for expected, batch in enumerate(batches) if expected != batch)
            raise LedgerError(f"{layout.ledger(self._run_id, missing)} is missing, but later entries exist: restore it")
        for batch in batches:
            entry = self.required(batch)
            if entry["batch"] != batch:
                raise LedgerError(f"{layout.ledger(self._run_id, batch)} holds the entry of step {entry['batch']}")
            check_entry(layout.ledger(self._run_id, batch), entry)
            self._check_previous(entry)
        return self.head()

    def _check_previous(self, entry: Mapping[str, Any]) -> None:
        if entry["previous"] != (expected := self.previous(entry["batch"])):
            raise LedgerError(
                f"{layout.ledger(self._run_id, entry['batch'])} does not continue the chain: previous is "
                f"{entry['previous']}, the entry before has {expected}: it was changed or belongs to another run"
            )

    def _committed(self, version: int) -> bool:
        return self._store.exists(layout.ledger(self._run_id, version - 1))

    def required(self, batch: int) -> Entry:
        """The entry of training step ``batch``, of version 0 for -1. Raises LedgerError when it is not committed."""
        entry = self.entry(batch) if batch >= 0 else self.init()
        if entry is None:
            key = layout.ledger(self._run_id, batch) if batch >= 0 else layout.ledger_init(self._run_id)
            raise LedgerError(f"{key} is not committed in the store {self._store.uri}")
        return entry

    def _read(self, key: str) -> Entry | None:
        try:
            return self._store.read_json(key)
        except NotFound:
            return None


def check_entry(key: str, entry: Mapping[str, Any]) -> None:
    """Raise LedgerError unless ``entry`` has every key and its numbers agree with each other."""
    _require(key, entry, ENTRY_KEYS)
    _require(f"{key}: episodes", entry["episodes"], EPISODE_KEYS)
    _require(f"{key}: shards", entry["shards"], SHARD_KEYS)
    batch, episodes = entry["batch"], entry["episodes"]
    if (entry["version_in"], entry["version_out"]) != (batch, batch + 1):
        raise LedgerError(
            f"{key}: step {batch} makes version {batch + 1} of version {batch}, the entry says "
            f"{entry['version_in']} and {entry['version_out']}"
        )
    if episodes["planned"] != episodes["trained"] + sum(episodes["dropped"].values()):
        raise LedgerError(f"{key}: planned episodes are not trained plus dropped ones: {episodes}")


def _require(what: str, value: Mapping[str, Any], keys: frozenset[str]) -> None:
    if missing := sorted(keys - value.keys()):
        raise LedgerError(f"{what}: missing {', '.join(missing)}")


def _batches(keys: list[str]) -> list[int]:
    names = [key.rpartition("/")[2].removesuffix(".json") for key in keys]
    return sorted(int(name) for name in names if name.isdigit())
