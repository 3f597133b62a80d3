"""The registry of models: which weights are ``production`` and ``candidate`` under a name, and how that came about.

Invariants:
- ``models/<name>/<n>.json`` is the history of a name, from 0 on without a gap. Each entry holds the whole state, what
  was done, why, and the digest of the entry before: the newest entry is all that a reader needs.
- A change is one ``put_new``: of any number of concurrent writers exactly one writes entry ``n``. The others read the
  new state and decide again, so no decision ever rests on a state that has passed.
- What an alias stands for is there: weights that a collector was deleting when they got the alias lose it again.
- A record names weights by prefix and content digest, with the run, the version, the data and the parent they come
  from. It never changes: going back to an earlier model puts the same record in place again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from forge_core.store import LedgerError, NotFound, Store, StoreError, digest, layout
from forge_core.store.numbering import newest
from forge_core.store.retention import WORD_S

PRODUCTION, CANDIDATE = ALIASES = ("production", "candidate")
ACTIONS = ("register", "promote", "reject", "rollback")
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"

Record = dict[str, Any]  # weights, weights_digest, run_id, version, promoted_at, evaluation, parent, data, replaced
Entry = dict[str, Any]  # n, name, action, reason, subject, aliases, decision, previous, at


class RegistryError(StoreError):
    """The registry cannot do what was asked. The message says why, and what would work."""


@dataclass(frozen=True)
class Change:
    """What a decision wants: an ``action`` about ``subject``, after which the aliases are these."""

    action: str
    reason: str
    subject: Record
    production: Record | None
    candidate: Record | None
    decision: Mapping[str, Any] | None = None


Decide = Callable[[Entry | None], Change | None]


class Registry:
    """The history of the model ``name``. May be used from many threads."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, check_name(name)

    def head(self) -> Entry | None:
        """The newest entry: the state. None for a name without any."""
        if (first := self.entry(0)) is None:
            return None
        last = newest(self._exists, 0)
        return self.entry(last) if last else first

    def entry(self, n: int) -> Entry | None:
        try:
            return self.store.read_json(layout.model(self.name, n))
        except NotFound:
            return None

    def entries(self) -> list[Entry]:
        """The whole history, oldest first. An audit: it lists the store, to find entries after a gap. Raises
        LedgerError when the history is not an unbroken chain."""
        found = [self._required(n) for n in range(len(self.store.list(f"models/{self.name}")))]
        for before, entry in pairwise(found):
            if entry["previous"] != digest(before):
                raise LedgerError(
                    f"{layout.model(self.name, before['n'])} is not what entry {entry['n']} followed: it was changed; "
                    "restore it"
                )
        return found

    def newest_first(self) -> Iterator[Entry]:
        """The history backwards, read as far as it is looked at."""
        entry = self.head()
        while entry is not None:
            yield entry
            entry = self._required(entry["n"] - 1) if entry["n"] else None

    def alias(self, alias: str) -> Record | None:
        """The record that ``alias`` stands for now."""
        head = self.head()
        return head["aliases"][alias] if head else None

    def change(self, decide: Decide) -> Entry | None:
        """Write what ``decide(state)`` wants as the next entry. Called again with the newer state when another writer
        was first. None when it wants nothing (any more). Raises RegistryError, with the aliases as they were before,
        when their new weights are being deleted."""
        before, entry = self._write(decide)
        if entry is not None:
            self._require_kept(before, entry)
        return entry

    def _write(self, decide: Decide) -> tuple[Entry | None, Entry | None]:
        """The state that was followed, and the entry that follows it."""
        while True:
            head = self.head()
            wanted = decide(head)
            if wanted is None:
                return head, None
            entry = self._entry(head, wanted)
            if self.store.put_new_json(layout.model(self.name, entry["n"]), entry):
                return head, entry

    def _require_kept(self, before: Entry | None, entry: Entry) -> None:
        """A collector spares what aliases stand for. One that looked before ``entry`` was there has said before that
        what it deletes (``layout.deleting``), or is done."""
        old = before["aliases"] if before else dict.fromkeys(ALIASES)
        new = [r for alias, r in entry["aliases"].items() if r is not None and not _same(r, old[alias])]
        lost = [record for record in new if self._is_going(record["weights"])]
        if not lost:
            return
        reason = f"the weights of {shown(lost[0])} were being deleted"
        undo = Change("rollback", reason, lost[0], old[PRODUCTION], old[CANDIDATE])
        _, undone = self._write(lambda head: undo if head is not None and head["n"] == entry["n"] else None)
        found = "stays as it was" if undone else f"was changed again meanwhile (forge models {self.name} --history)"
        raise RegistryError(
            f"{self.name} {found}: {reason}, since nothing had needed them for gc.grace; promote a version "
            "that the run keeps (the newest, the best evaluated, or weights.keep of them)"
        )

    def _is_going(self, prefix: str) -> bool:
        beginning, now = layout.deleting(prefix), self.store.now()
        words = [key for key in self.store.list(beginning.rpartition("/")[0]) if key.startswith(beginning)]
        return not self.store.published(prefix) or any(now - self._written_at(key) < WORD_S for key in words)

    def _written_at(self, key: str) -> float:
        try:
            return self.store.written_at(key)
        except NotFound:
            return 0.0  # taken back: the collector has decided

    def register(self, record: Record, reason: str) -> Entry | None:
        """Make ``record`` the candidate; nothing to do when it is already."""

        def decide(head: Entry | None) -> Change | None:
            if head and _same(head["aliases"][CANDIDATE], record):
                return None
            return Change("register", reason, record, head["aliases"][PRODUCTION] if head else None, record)

        return self.change(decide)

    def promote(self, record: Record, reason: str, check: Callable[[Entry | None], None] | None = None) -> Entry | None:
        """Make ``record`` the production model; nothing to do when it is already. ``check`` looks at the state that
        the promotion would follow, and raises when it must not."""

        def decide(head: Entry | None) -> Change | None:
            if head and _same(head["aliases"][PRODUCTION], record):
                return None
            if check is not None:
                check(head)
            return promotion(head, record, reason)

        return self.change(decide)

    def rollback(self, reason: str) -> Entry:
        """Put the production model before the present one in its place again. Raises RegistryError when there is none
        or its weights are gone."""

        def decide(head: Entry | None) -> Change:
            now = head["aliases"][PRODUCTION] if head else None
            before = self.before(now) if now else None
            if head is None or before is None:
                raise RegistryError(self._nothing_before(now))
            require_weights(self.store, before, f"cannot roll {self.name} back")
            return Change("rollback", reason, before, before, head["aliases"][CANDIDATE])

        entry = self.change(decide)
        assert entry is not None
        return entry

    def before(self, production: Record) -> Record | None:
        """The production model that ``production`` replaced when it was promoted."""
        replaced = production["replaced"]
        return None if replaced is None else self._required(replaced)["aliases"][PRODUCTION]

    def _nothing_before(self, now: Record | None) -> str:
        if now is None:
            return (
                f"{self.name} has no production model in {self.store.uri}: forge promote {self.name} RUN_ID makes one"
            )
        return (
            f"{self.name} has had no production model before {shown(now)}: forge models {self.name} --history shows "
            "all; forge promote makes any committed version the production model"
        )

    def _entry(self, head: Entry | None, wanted: Change) -> Entry:
        return {
            "n": head["n"] + 1 if head else 0,
            "name": self.name,
            "action": wanted.action,
            "reason": wanted.reason,
            "subject": wanted.subject,
            "aliases": {PRODUCTION: wanted.production, CANDIDATE: wanted.candidate},
            "decision": dict(wanted.decision) if wanted.decision else None,
            "previous": digest(head) if head else None,
            "at": _now(),
        }

    def _exists(self, n: int) -> bool:
        return self.store.exists(layout.model(self.name, n))

    def _required(self, n: int) -> Entry:
        entry = self.entry(n)
        if entry is None:
            raise LedgerError(f"{layout.model(self.name, n)} is missing, but later entries exist: restore it")
        return entry


def promotion(head: Entry | None, record: Record, reason: str, decision: Mapping[str, Any] | None = None) -> Change:
    """The change that makes ``record`` the production model after ``head``. It is no candidate any more."""
    placed = {**record, "promoted_at": _now(), "replaced": head["n"] if head and head["aliases"][PRODUCTION] else None}
    candidate = head["aliases"][CANDIDATE] if head else None
    return Change("promote", reason, placed, placed, None if _same(candidate, record) else candidate, decision)


def rejection(head: Entry | None, record: Record, reason: str, decision: Mapping[str, Any]) -> Change:
    """The change that only records why ``record`` was not promoted. It is no candidate any more."""
    aliases = head["aliases"] if head else dict.fromkeys(ALIASES)
    candidate = None if _same(aliases[CANDIDATE], record) else aliases[CANDIDATE]
    return Change("reject", reason, record, aliases[PRODUCTION], candidate, decision)


def check_name(name: str) -> str:
    """``name``, when it can be that of a model. Raises RegistryError."""
    if not re.fullmatch(NAME, name):
        raise RegistryError(
            f"{name!r} cannot be the name of a model: up to 100 letters, digits and any of . _ -, the first a letter "
            "or digit"
        )
    return name


def names(store: Store) -> list[str]:
    """The names of all models of the store, sorted."""
    return sorted({key.split("/")[1] for key in store.list("models")})


def require_weights(store: Store, record: Record, what: str) -> None:
    """Raise RegistryError unless the weights of ``record`` are in the store, and are those that it names."""
    if not store.published(record["weights"]):
        raise RegistryError(f"{what}: the weights of {shown(record)} ({record['weights']}) are gone from {store.uri}")
    content = store.open_published(record["weights"]).manifest.content
    if content != record["weights_digest"]:
        raise RegistryError(
            f"{what}: {record['weights']} holds other weights ({content[:12]}) than were registered "
            f"({record['weights_digest'][:12]}): restore the object that the run published"
        )


def shown(record: Record) -> str:
    """``version 3 of run-1``."""
    return f"version {record['version']} of {record['run_id']}"


def _same(one: Record | None, other: Record | None) -> bool:
    keys = ("run_id", "version", "weights_digest")
    return one is not None and other is not None and all(one[key] == other[key] for key in keys)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
