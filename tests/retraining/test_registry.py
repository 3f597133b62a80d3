"""The registry: one history, one winner of each change, and a way back."""

from __future__ import annotations

import multiprocessing
import threading
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forge_core.store import LedgerError, Store, digest, layout, open_store
from forge_core.weights.registry import Registry, RegistryError, names, promotion
from tests.retraining.records import published, record

S3 = pytest.param("s3", marks=pytest.mark.server)
THREADS, PROCESSES, ROUNDS = 6, 3, 4


@pytest.fixture(params=["file", S3])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that several processes can use."""
    return f"{request.getfixturevalue('s3_store_uri')}/{uuid.uuid4().hex}" if request.param == "s3" else str(tmp_path)


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


def production(registry: Registry) -> str:
    now = registry.alias("production")
    return now["run_id"] if now else "none"


def test_an_entry_is_the_whole_state_and_names_the_entry_before(store: Store):
    registry = Registry(store, "digits")
    assert registry.head() is None
    registry.register(published(store, "a"), "to be evaluated")
    registry.promote(published(store, "a"), "better")
    registry.promote(published(store, "b"), "better still")
    first, second, third = registry.entries()
    assert [e["action"] for e in (first, second, third)] == ["register", "promote", "promote"]
    assert first["aliases"]["candidate"]["run_id"] == "a"
    assert first["aliases"]["production"] is None
    assert second["aliases"]["candidate"] is None
    assert third["aliases"]["production"]["run_id"] == "b"
    assert (third["n"], third["reason"], third["previous"]) == (2, "better still", digest(second))
    assert first["previous"] is None
    assert registry.head() == third
    assert names(store) == ["digits"]


def test_the_head_is_found_however_long_the_history_is(store: Store):
    registry = Registry(store, "m")
    for n in range(21):
        registry.promote(published(store, f"run-{n}"), "next")
        head = Registry(store, "m").head()
        assert head is not None
        assert head["n"] == n


def test_what_holds_already_is_not_written_again(store: Store):
    registry = Registry(store, "m")
    assert registry.promote(published(store, "a"), "once") is not None
    assert registry.promote(published(store, "a"), "twice") is None
    assert registry.register(published(store, "b"), "once") is not None
    assert registry.register(published(store, "b"), "twice") is None
    assert [e["reason"] for e in registry.entries()] == ["once", "once"]


def test_a_rollback_goes_one_production_model_back_each_time_then_says_that_there_is_none(store: Store):
    registry = Registry(store, "m")
    for name in ("a", "b", "c"):
        registry.promote(published(store, name), "better")
        registry.register(published(store, f"candidate after {name}"), "waits")
    placed = registry.entries()[0]["aliases"]["production"]
    assert registry.rollback("c is bad")["reason"] == "c is bad"
    assert production(registry) == "b"
    registry.promote(published(store, "d"), "better")
    registry.rollback("d is bad")
    assert production(registry) == "b"
    registry.rollback("b is bad too")
    assert registry.alias("production") == placed
    assert registry.alias("candidate") is not None
    with pytest.raises(RegistryError, match=r"no production model before version 1 of a"):
        registry.rollback("and a")
    assert production(registry) == "a"


def test_a_rollback_to_weights_that_are_gone_or_changed_is_refused_and_changes_nothing(store: Store):
    registry = Registry(store, "m")
    gone = published(store, "a")
    registry.promote(gone, "first")
    registry.promote(published(store, "b"), "second")
    for key in store.list(gone["weights"]):
        store.delete(key)
    with pytest.raises(RegistryError, match=r"version 1 of a .* are gone"):
        registry.rollback("b is bad")
    store.publish(gone["weights"], {"model.safetensors": b"others"}, request="others")
    with pytest.raises(RegistryError, match="holds other weights"):
        registry.rollback("b is bad")
    assert production(registry) == "b"
    assert len(registry.entries()) == 2


def test_a_model_without_production_cannot_be_rolled_back(store: Store):
    with pytest.raises(RegistryError, match=r"no production model.*forge promote m RUN_ID"):
        Registry(store, "m").rollback("why not")


def test_a_changed_entry_is_found(store: Store):
    registry = Registry(store, "m")
    for name in ("a", "b", "c"):
        registry.promote(published(store, name), "better")
    changed = {**registry.entries()[1], "reason": "somebody rewrote history"}
    store.delete(layout.model("m", 1))
    with pytest.raises(LedgerError, match=r"00000001\.json is missing"):
        registry.entries()
    store.put_new_json(layout.model("m", 1), changed)
    with pytest.raises(LedgerError, match=r"00000001\.json is not what entry 2 followed"):
        registry.entries()


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a" * 101, "a b"])
def test_a_name_that_cannot_be_one_is_refused(store: Store, name: str):
    with pytest.raises(RegistryError, match="cannot be the name of a model"):
        Registry(store, name)


def test_who_loses_a_race_decides_again_on_the_state_that_won(store: Store):
    """The loser wanted to promote only while there was no production model."""
    registry, seen = Registry(store, "m"), []

    def decide(head: dict[str, Any] | None) -> Any:
        seen.append(head["n"] if head else None)
        if head is None:
            Registry(store, "m").promote(published(store, "rival"), "faster")  # between reading and writing
            return promotion(head, record("slow"), "on an empty registry")
        return None

    assert registry.change(decide) is None
    assert seen == [None, 0]
    assert production(registry) == "rival"


def test_weights_that_are_deleted_while_they_are_promoted_leave_the_model_as_it_was(store: Store):
    registry = Registry(store, "m")
    registry.promote(published(store, "a"), "first")
    registry.register(published(store, "waits"), "waits")
    doomed = published(store, "doomed")
    store.put_json(layout.deleting(doomed["weights"], "one"), {})  # a collector that looked before
    with pytest.raises(
        RegistryError, match=r"m stays as it was: the weights of version 1 of doomed were being deleted"
    ):
        registry.promote(doomed, "better")
    with pytest.raises(RegistryError, match="gone were being deleted"):
        registry.promote(record("gone"), "better")
    assert production(registry) == "a"
    assert registry.alias("candidate")["run_id"] == "waits"
    actions = [e["action"] for e in registry.entries()]
    assert actions == ["promote", "register", "promote", "rollback", "promote", "rollback"]


def promote_some(uri: str, writer: int) -> None:
    store = open_store(uri)
    registry = Registry(store, "contested")
    for turn in range(ROUNDS):
        assert registry.promote(published(store, f"run-{writer}-{turn}"), "race") is not None


def assert_every_promotion_has_its_own_entry(uri: str, writers: int) -> None:
    entries = Registry(open_store(uri), "contested").entries()  # checks the chain
    assert [e["n"] for e in entries] == list(range(writers * ROUNDS))
    assert {e["subject"]["run_id"] for e in entries} == {f"run-{w}-{t}" for w in range(writers) for t in range(ROUNDS)}
    for before, after in pairwise(entries):
        assert after["subject"]["replaced"] == before["n"]


def test_concurrent_promotions_of_threads_each_win_one_entry(uri: str):
    threads = [threading.Thread(target=promote_some, args=(uri, w)) for w in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_every_promotion_has_its_own_entry(uri, THREADS)


def test_concurrent_promotions_of_processes_each_win_one_entry(uri: str):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=promote_some, args=(uri, w)) for w in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [p.exitcode for p in processes] == [0] * PROCESSES
    assert_every_promotion_has_its_own_entry(uri, PROCESSES)
