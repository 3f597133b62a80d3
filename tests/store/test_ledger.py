"""Only the ledger makes a version exist, and it is an unbroken chain."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from forge_core.store import Ledger, LedgerError, Store, entry_digest, layout
from tests.store.entries import RUN, committed, entry, init_entry


def rewrite(store: Store, key: str, value: dict[str, Any] | None) -> None:
    store.delete(key)
    if value is not None:
        store.put_new_json(key, value)


def test_without_init_there_is_no_version(memory: Store) -> None:
    ledger = Ledger(memory, RUN)
    assert ledger.head() == -1
    assert ledger.init() is None
    assert ledger.entries() == []
    with pytest.raises(LedgerError, match=r"runs/run-1/ledger/init.json is not committed"):
        ledger.weights_prefix(0)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 100])
def test_the_head_is_the_number_of_committed_steps(memory: Store, steps: int) -> None:
    writer = committed(memory, steps)
    reader = Ledger(memory, RUN)
    assert reader.head() == writer.head() == steps == reader.head()
    assert [e["batch"] for e in reader.entries()] == list(range(steps))
    assert reader.weights_prefix(steps) == layout.weights(RUN, steps, "a0")
    assert reader.verify() == steps


def test_the_head_is_found_with_few_look_ups_and_no_listing(memory: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    committed(memory, 100)
    looked_up: list[str] = []
    exists = memory.exists
    monkeypatch.setattr(memory, "exists", lambda key: looked_up.append(key) or exists(key))
    monkeypatch.setattr(memory, "list", lambda prefix: pytest.fail(f"listed {prefix}"))
    ledger = Ledger(memory, RUN)
    assert ledger.head() == 100
    assert len(looked_up) <= 15
    looked_up.clear()
    assert ledger.head() == 100
    assert looked_up == [layout.ledger(RUN, 100)]


def test_the_head_follows_other_writers(memory: Store) -> None:
    reader = Ledger(memory, RUN)
    assert reader.head() == -1
    writer = committed(memory, 3)
    assert reader.head() == 3
    for batch in range(3, 10):
        writer.commit(entry(batch, writer.previous(batch)))
    assert reader.head() == 10


def test_of_two_trainers_that_commit_one_step_one_wins(store: Store) -> None:
    ledger = committed(store, 1)
    barrier = threading.Barrier(8)

    def commit(number: int) -> bool:
        mine = entry(1, ledger.previous(1), attempt=f"a{number}")
        barrier.wait()
        return Ledger(store, RUN).commit(mine)

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(commit, range(8)))
    assert sum(won) == 1
    winner = ledger.entry(1)
    assert winner is not None
    assert winner["attempt"] == f"a{won.index(True)}"
    assert ledger.weights_prefix(2) == layout.weights(RUN, 2, winner["attempt"])
    assert ledger.head() == 2


def test_init_is_committed_once(memory: Store) -> None:
    ledger = Ledger(memory, RUN)
    assert ledger.commit_init(init_entry("a0"))
    assert not ledger.commit_init(init_entry("a1"))
    assert ledger.weights_prefix(0) == layout.weights(RUN, 0, "a0")


def test_an_entry_after_a_gap_is_refused(memory: Store) -> None:
    ledger = committed(memory, 1)
    with pytest.raises(LedgerError, match=r"ledger/00000001.json is not committed"):
        ledger.commit(entry(2, "whatever"))
    assert ledger.head() == 1


def test_an_entry_that_does_not_continue_the_chain_is_refused(memory: Store) -> None:
    ledger = committed(memory, 1)
    with pytest.raises(LedgerError, match=r"ledger/00000001.json does not continue the chain: previous is fork"):
        ledger.commit(entry(1, "fork"))
    assert ledger.head() == 1


@pytest.mark.parametrize("key", ["cursor", "previous", "state_digest", "attempt", "weights_digest", "metrics"])
def test_missing_keys_are_named(memory: Store, key: str) -> None:
    ledger = committed(memory, 0)
    lacking = entry(0, ledger.previous(0))
    del lacking[key]
    with pytest.raises(LedgerError, match=f"ledger/00000000.json: missing {key}"):
        ledger.commit(lacking)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"episodes": {"planned": 8, "trained": 8}}, "episodes: missing dropped"),
        ({"shards": {"episodes": []}}, "shards: missing reference, rewards"),
        ({"episodes": {"planned": 8, "trained": 6, "dropped": {"late": 1}}}, "planned episodes are not trained plus"),
        ({"version_out": 2}, "step 0 makes version 1 of version 0"),
    ],
)
def test_entries_that_do_not_add_up_are_refused(memory: Store, changes: dict[str, Any], message: str) -> None:
    ledger = committed(memory, 0)
    with pytest.raises(LedgerError, match=message):
        ledger.commit(entry(0, ledger.previous(0), **changes))


def test_init_without_its_keys_is_refused(memory: Store) -> None:
    with pytest.raises(LedgerError, match=r"init.json: missing finished_at, metrics, model, started_at, state_digest"):
        Ledger(memory, RUN).commit_init({"version": 0, "weights": "w", "weights_digest": "d"})


def test_equal_decisions_have_equal_digests(memory: Store) -> None:
    one = entry(3, "p", attempt="aaa")
    other = entry(3, "p", attempt="bbb", started_at="later", finished_at="later")
    other["metrics"] = {**other["metrics"], "time/train": 99.0}
    assert entry_digest(one) == entry_digest(other)
    assert entry_digest(init_entry("aaa")) == entry_digest(init_entry("bbb", finished_at="later"))


@pytest.mark.parametrize(
    "changes",
    [
        {"state_digest": "x"},
        {"previous": "x"},
        {"metrics": {"reward/mean": 0.6, "loss": 0.1}},
        {"weights": layout.weights(RUN, 9, "aaa")},
        {"cursor": {"epoch": 1, "index": 0}},
    ],
)
def test_different_decisions_have_different_digests(changes: dict[str, Any]) -> None:
    assert entry_digest(entry(3, "p")) != entry_digest({**entry(3, "p"), **changes})


def test_an_alias_of_older_weights_is_an_ordinary_version(memory: Store) -> None:
    ledger = committed(memory, 1)
    old = ledger.weights_prefix(1)
    none = {"planned": 8, "trained": 0, "dropped": {"zero_advantage": 8}}
    assert ledger.commit(entry(1, ledger.previous(1), weights=old, episodes=none))
    assert ledger.weights_prefix(2) == ledger.weights_prefix(1) == old
    assert ledger.verify() == 2


def test_verify_names_a_missing_entry(memory: Store) -> None:
    ledger = committed(memory, 5)
    rewrite(memory, layout.ledger(RUN, 2), None)
    with pytest.raises(LedgerError, match=r"ledger/00000002.json is missing, but later entries exist"):
        ledger.verify()


def test_verify_names_the_entry_after_a_changed_one(memory: Store) -> None:
    ledger = committed(memory, 5)
    changed = ledger.entry(2)
    assert changed is not None
    rewrite(memory, layout.ledger(RUN, 2), {**changed, "tokens": 1})
    with pytest.raises(LedgerError, match=r"ledger/00000003.json does not continue the chain"):
        ledger.verify()


def test_verify_names_an_entry_under_a_wrong_number(memory: Store) -> None:
    ledger = committed(memory, 2)
    first = ledger.entry(0)
    assert first is not None
    rewrite(memory, layout.ledger(RUN, 1), first)
    with pytest.raises(LedgerError, match=r"ledger/00000001.json"):
        ledger.verify()
