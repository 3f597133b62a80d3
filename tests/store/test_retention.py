"""Nothing reachable is ever deleted, what is unreachable goes after its grace, and nothing leaks."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.store import CorruptObject, Ledger, Store, layout, open_store
from forge_core.store.checkpoints import complete_checkpoints, publish_checkpoint
from forge_core.store.retention import WORD_S, Collected, collect
from tests.store.entries import RUN, committed, entry, init_entry

KEPT_FOR_EVER = ("plans", "episodes", "rewards", "reference", "ledger")


def checkpointed(store: Store, entry: dict[str, Any], attempt: str, files: dict[str, bytes | Path]) -> str:
    """The prefix of a checkpoint after ``entry``."""
    uploaded = store.upload(layout.checkpoint(RUN, entry["batch"], attempt), files)
    return publish_checkpoint(store, RUN, entry, attempt, uploaded).prefix


class Run:
    """A run that grows step by step, and its own account of what must be there."""

    def __init__(
        self, staleness: int, keep_weights: int, keep_checkpoints: int, grace_s: float, root: str = "memory:/"
    ) -> None:
        self.store: Store = open_store(f"{root}/{uuid.uuid4().hex}")
        self.store._backend.clock = lambda: self.now  # type: ignore[attr-defined]  # the clock of a store in memory
        self.rules: dict[str, Any] = {
            "staleness": staleness,
            "keep_weights": keep_weights,
            "keep_checkpoints": keep_checkpoints,
            "grace_s": grace_s,
        }
        self.now, self.tries = 0.0, 0
        self.last_reachable: dict[str, float] = {}
        self.checkpoints: list[str] = []
        self.open_tries: set[str] = set()  # prefixes of the step that is not committed yet
        self._publish(layout.weights(RUN, 0, "a0"))
        self.ledger = committed(self.store, 0)
        self.ledger.commit_init(init_entry())

    def step(self, alias: bool = False) -> None:
        batch = self.ledger.head()
        for key in (layout.plan(RUN, batch, 0), *(f(RUN, batch, 0, 0) + "manifest.json" for f in SHARDS)):
            self.store.put_new_json(key, {"batch": batch})
        attempt = self._try_step(batch, alias)
        changes = {"weights": self.ledger.weights_prefix(batch)} if alias else {}
        assert self.ledger.commit(entry(batch, self.ledger.previous(batch), attempt, **changes))
        self.open_tries.clear()

    def lost_try(self) -> None:
        """A trainer that published everything and was killed before its commit."""
        self._try_step(self.ledger.head(), alias=False)

    def torn_try(self) -> None:
        """A trainer that was killed while it published."""
        prefix = layout.weights(RUN, self.ledger.head() + 1, self._attempt())
        self.store.put_new(f"{prefix}model-0.bin", b"x")
        self.open_tries.add(prefix)

    def checkpoint(self) -> None:
        head = self.ledger.head()
        last = self.ledger.entry(head - 1) if head else None
        if last is not None and not (self.checkpoints and f"/{last['batch']:08d}-" in self.checkpoints[-1]):
            self.checkpoints.append(checkpointed(self.store, last, self._attempt(), {"state": b"x", "meta": b"y"}))

    def torn_checkpoint(self) -> None:
        batch = max(0, self.ledger.head() - 1)
        self.store.put_new(layout.checkpoint(RUN, batch, self._attempt()) + "state-0", b"x")

    def wait(self) -> None:
        self.now += 7.0

    def collect(self) -> Collected:
        self.observe()
        before = set(self.objects())
        deleted = collect(self.store, RUN, **self.rules)
        assert before - set(self.objects()) == set(deleted.prefixes)
        for prefix in deleted.prefixes:
            assert self.now - self.last_reachable.get(prefix, -1e9) >= self.rules["grace_s"], prefix
        self.check()
        return deleted

    def observe(self) -> None:
        self.last_reachable |= dict.fromkeys(self.must_stay() | self.open_tries, self.now)

    def must_stay(self) -> set[str]:
        """The rules of retention, spelled out one by one."""
        head, rules = self.ledger.head(), self.rules
        versions = [
            version
            for version in range(head + 1)
            if version == 0 or version >= head - rules["staleness"] or version > head - rules["keep_weights"]
        ]
        named = {self.ledger.weights_prefix(version) for version in versions}
        tables = {e["training"] for e in self.ledger.entries()}
        return named | tables | set(self.checkpoints[-rules["keep_checkpoints"] :])

    def check(self) -> None:
        assert self.open_tries <= set(self.objects())
        for prefix in self.must_stay():
            published = self.store.open_published(prefix)
            assert all(published.read(name) for name in published.files)
        for batch in range(self.ledger.head()):
            assert self.store.exists(layout.plan(RUN, batch, 0))
            assert all(self.store.published(f(RUN, batch, 0, 0)) for f in SHARDS)
        assert self.ledger.verify() == self.ledger.head()

    def objects(self) -> list[str]:
        """Prefixes of everything that may be deleted."""
        kinds = ("weights", "checkpoints", "training")
        keys = [key for kind in kinds for key in self.store.list(f"runs/{RUN}/{kind}")]
        return sorted({"/".join(key.split("/")[:4]) + "/" for key in keys})

    def close(self) -> None:
        for key in self.store.list(""):
            self.store.delete(key)

    def _try_step(self, batch: int, alias: bool) -> str:
        attempt = self._attempt()
        self._publish(layout.training(RUN, batch, attempt))
        if not alias:
            self._publish(layout.weights(RUN, batch + 1, attempt))
        return attempt

    def _publish(self, prefix: str) -> None:
        self.store.publish(prefix, {"data": prefix.encode()}, request="r")
        self.open_tries.add(prefix)

    def _attempt(self) -> str:
        self.tries += 1
        return f"try{self.tries}"


SHARDS = (layout.episodes, layout.rewards, layout.reference)
ACTIONS = {
    "step": Run.step,
    "alias": lambda run: run.step(alias=True),
    "lost try": Run.lost_try,
    "torn try": Run.torn_try,
    "checkpoint": Run.checkpoint,
    "torn checkpoint": Run.torn_checkpoint,
    "wait": Run.wait,
    "collect": Run.collect,
}


@settings(max_examples=60, deadline=None)
@given(
    actions=st.lists(st.sampled_from([*sorted(ACTIONS), "step", "step", "collect", "wait"]), max_size=30),
    staleness=st.integers(0, 4),
    keep_weights=st.integers(1, 4),
    keep_checkpoints=st.integers(2, 3),
    grace_s=st.sampled_from([0.0, 5.0, 20.0]),
)
def test_nothing_reachable_is_deleted_and_nothing_leaks(
    actions: list[str], staleness: int, keep_weights: int, keep_checkpoints: int, grace_s: float
) -> None:
    run = Run(staleness, keep_weights, keep_checkpoints, grace_s)
    for action in actions:
        ACTIONS[action](run)
        run.observe()
    run.step()  # closes the open step and its tries
    run.checkpoint()
    run.collect()
    run.now += grace_s
    run.collect()
    assert set(run.objects()) == run.must_stay()
    assert run.store.list(f"runs/{RUN}/gc") == []
    run.close()


def grown(steps: int, **rules: Any) -> Run:
    run = Run(**{"staleness": 1, "keep_weights": 2, "keep_checkpoints": 2, "grace_s": 0.0, **rules})
    for _ in range(steps):
        run.step()
        run.checkpoint()
    return run


def versions(run: Run) -> list[int]:
    return [int(prefix.split("/")[3][:8]) for prefix in run.objects() if "/weights/" in prefix]


def test_the_window_of_staleness_the_newest_versions_and_version_0_stay() -> None:
    run = grown(10, staleness=3, keep_weights=2)
    before = sum(run.store.sizes("").values())
    deleted = run.collect()
    assert versions(run) == [0, 7, 8, 9, 10]
    assert len(deleted.prefixes) == 6 + 8  # versions 1 to 6, and all checkpoints but two
    assert sum(len(garbage.keys) for garbage in deleted.garbage) == 6 * 2 + 8 * 3
    assert sum(garbage.bytes for garbage in deleted.garbage) == before - sum(run.store.sizes("").values())
    run = grown(10, staleness=0, keep_weights=4)
    run.collect()
    assert versions(run) == [0, 7, 8, 9, 10]


def test_the_two_newest_complete_checkpoints_of_the_chain_stay() -> None:
    run = grown(5)
    run.step()
    run.torn_checkpoint()
    run.collect()
    assert [checkpoint.batch for checkpoint in complete_checkpoints(run.store, RUN)] == [3, 4]
    assert len([prefix for prefix in run.objects() if "/checkpoints/" in prefix]) == 3  # the torn one may still grow
    run.checkpoint()
    run.collect()
    assert [checkpoint.batch for checkpoint in complete_checkpoints(run.store, RUN)] == [4, 5]
    assert len([prefix for prefix in run.objects() if "/checkpoints/" in prefix]) == 2


def test_a_checkpoint_of_a_try_that_decided_otherwise_is_not_of_the_chain() -> None:
    run = grown(2)
    committed_entry = run.ledger.entry(1)
    assert committed_entry is not None
    checkpointed(run.store, {**committed_entry, "state_digest": "other"}, "foreign", {"state": b"x"})
    assert [checkpoint.prefix for checkpoint in complete_checkpoints(run.store, RUN)] == run.checkpoints


def test_what_an_open_step_has_published_stays_until_another_try_is_committed() -> None:
    run = grown(3)
    run.lost_try()
    run.torn_try()
    tries = set(run.open_tries)
    assert len(tries) == 3
    assert not tries & set(run.collect().prefixes)
    run.step()
    assert tries <= set(run.collect().prefixes)


def test_an_alias_keeps_the_weights_that_it_names() -> None:
    run = grown(3, staleness=0, keep_weights=1)
    for _ in range(4):
        run.step(alias=True)
    run.collect()
    assert versions(run) == [0, 3]


def test_the_grace_period_begins_when_an_object_is_found_unreachable() -> None:
    run = grown(4, grace_s=10.0)
    first = run.collect()
    assert first.prefixes == ()
    assert len(first.waiting) == 2 + 2
    run.now += 9.9
    assert run.collect().prefixes == ()
    run.now += 0.2
    assert run.collect().prefixes == first.waiting


def test_a_checkpoint_that_was_complete_after_all_gets_a_grace_period_of_its_own() -> None:
    run = grown(2, grace_s=10.0)
    run.step()
    slow = layout.checkpoint(RUN, 2, "slow")
    run.store.put_new(f"{slow}state-1", b"x")
    run.step()
    run.checkpoint()
    assert slow in run.collect().waiting  # an upload that a newer checkpoint overtook
    followed = run.ledger.entry(2)
    assert followed is not None
    checkpointed(run.store, followed, "slow", {"state": b"x"})  # one of the two newest now
    run.step()
    run.checkpoint()
    run.now += 11
    assert slow in run.collect().waiting
    run.now += 11
    assert slow in run.collect().prefixes


def test_pinned_weights_stay_and_their_grace_starts_anew() -> None:
    run = grown(6, staleness=0, keep_weights=1, grace_s=10.0)
    pinned = run.ledger.weights_prefix(3)
    run.collect()
    run.now = 20
    deleted = collect(run.store, RUN, pinned=lambda: [pinned], **run.rules)
    assert pinned not in deleted.prefixes + deleted.waiting
    run.now = 21
    assert pinned in run.collect().waiting
    run.now = 31
    assert pinned in run.collect().prefixes


def test_weights_that_are_pinned_while_they_are_about_to_be_deleted_stay() -> None:
    """Between the two looks a promotion may come; it must find the collector's word from the second look on."""
    run = grown(6, staleness=0, keep_weights=1, grace_s=10.0)
    promoted, looks = run.ledger.weights_prefix(3), []
    run.collect()
    run.now = 20

    def pinned() -> list[str]:
        looks.append(any(k.startswith(layout.deleting(promoted)) for k in run.store.list(f"runs/{RUN}/gc")))
        return [promoted] if len(looks) > 1 else []

    deleted = collect(run.store, RUN, pinned=pinned, **run.rules)
    assert looks == [False, True]
    assert promoted not in deleted.prefixes
    assert run.ledger.weights_prefix(2) in deleted.prefixes
    assert run.store.published(promoted)
    assert [key for key in run.store.list(f"runs/{RUN}/gc") if "deleting" in key] == []


def test_the_word_of_a_collector_that_was_killed_goes_with_a_later_collection() -> None:
    run = grown(6)
    left = layout.deleting(run.ledger.weights_prefix(2), "killed")
    run.store.put_json(left, {"prefix": run.ledger.weights_prefix(2)})
    run.now += WORD_S - 1
    collect(run.store, RUN, **run.rules)
    assert run.store.exists(left)
    run.now += 1
    collect(run.store, RUN, dry_run=True, **run.rules)
    assert run.store.exists(left)
    collect(run.store, RUN, **run.rules)
    assert [key for key in run.store.list(f"runs/{RUN}/gc") if "deleting" in key] == []


def test_a_deletion_removes_the_manifest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    run = grown(6)
    deleted: list[str] = []
    monkeypatch.setattr(run.store, "delete", deleted.append)
    prefixes = collect(run.store, RUN, **run.rules).prefixes
    for prefix in prefixes:
        assert next(key for key in deleted if key.startswith(prefix)) == f"{prefix}manifest.json"


def test_a_collection_that_was_interrupted_is_finished_by_the_next() -> None:
    run = grown(6)
    doomed = run.ledger.weights_prefix(2)
    run.store.delete(f"{doomed}manifest.json")
    assert doomed in run.collect().prefixes
    assert run.store.list(doomed) == []


def test_a_dry_run_says_what_would_go_and_changes_nothing() -> None:
    run = grown(6)
    before = run.store.list("")
    said = collect(run.store, RUN, dry_run=True, **run.rules)
    assert run.store.list("") == before
    assert said.prefixes
    assert run.collect().garbage == said.garbage
    waits = grown(6, grace_s=10.0)
    before = waits.store.list("")
    assert collect(waits.store, RUN, dry_run=True, **waits.rules).waiting
    assert waits.store.list("") == before  # no tombstone: the grace does not begin


def test_a_tombstone_whose_object_is_gone_goes_too() -> None:
    run = grown(4, grace_s=10.0)
    for key in run.store.list(run.collect().waiting[0]):
        run.store.delete(key)
    graves = len(run.store.list(f"runs/{RUN}/gc"))
    run.collect()
    assert len(run.store.list(f"runs/{RUN}/gc")) == graves - 1


@pytest.mark.parametrize("ahead_s", [86_400.0, -86_400.0])
def test_the_clocks_of_two_collectors_are_never_compared(
    store: Store, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    rules = {"staleness": 0, "keep_weights": 1, "keep_checkpoints": 2, "grace_s": 3600.0}
    ledger = committed(store, 5)
    for version in range(6):
        store.publish(ledger.weights_prefix(version), {"data": b"x"}, request="r")
    here = time.time()
    clock = time.time  # of the store in memory
    if store.uri.startswith("memory"):
        monkeypatch.setattr(store._backend, "clock", clock)
    monkeypatch.setattr(time, "time", lambda: here - ahead_s)
    assert len(collect(store, RUN, **rules).waiting) == 4
    monkeypatch.setattr(time, "time", lambda: here + ahead_s)
    assert collect(store, RUN, **rules).prefixes == ()


def test_a_reader_slower_than_several_collections_reads_to_the_end(store: Store) -> None:
    grace_s = 4.0 if store.uri.startswith("s3") else 1.0
    rules = {"staleness": 0, "keep_weights": 1, "keep_checkpoints": 2, "grace_s": grace_s}
    ledger = committed(store, 1)
    files = {f"model-{part}.safetensors": bytes([part]) * 1000 for part in range(6)}
    store.publish(ledger.weights_prefix(1), files, request="r")
    collect(store, RUN, **rules)
    reader = store.open_published(Ledger(store, RUN).weights_prefix(1))  # reachable now, and then no more
    for batch in (1, 2):
        ledger.commit(entry(batch, ledger.previous(batch)))
    first_unreachable = time.monotonic()
    for name, body in files.items():
        collect(store, RUN, **rules)
        assert reader.read(name) == body
        time.sleep(0.05)
    while not (deleted := collect(store, RUN, **rules)).prefixes:
        time.sleep(0.05)
    assert time.monotonic() - first_unreachable >= grace_s
    assert deleted.prefixes == (reader.manifest.prefix,)
    with pytest.raises(CorruptObject, match="is missing although the manifest"):
        reader.read("model-0.safetensors")


@pytest.mark.parametrize(
    ("setting", "rule", "value"),
    [
        ("checkpoint.keep", "keep_checkpoints", 1),
        ("weights.keep", "keep_weights", 0),
        ("max_staleness", "staleness", -1),
        ("gc.grace", "grace_s", -1),
    ],
)
def test_rules_that_keep_less_than_a_resume_needs_are_refused(setting: str, rule: str, value: int) -> None:
    run = grown(0)
    run.rules[rule] = value
    with pytest.raises(ValueError, match=f"{setting} is {value}: a run that can be resumed needs"):
        collect(run.store, RUN, **run.rules)


@pytest.mark.server
def test_retention_works_on_s3(s3_store_uri: str) -> None:
    run = grown(5, root=s3_store_uri)
    run.collect()
    assert versions(run) == [0, 4, 5]
