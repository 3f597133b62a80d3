"""A store without room: every write is a clear error and makes no object, what is there stays readable, and room can be
made with the commands for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from flows.cli import main
from forge_core.config import load_config
from forge_core.runs.garbage import collect_garbage
from forge_core.runs.record import create_run, load_run
from forge_core.store import Store, StoreError, open_store, s3
from tests.fixtures_s3 import seaweedfs
from tests.store.entries import RUN, committed

PIECE = 16 * 2**20  # bytes


def fill(store: Store, size: int) -> list[str]:
    """Publish objects of ``size`` bytes until the store takes no more; the prefixes of those it took."""
    taken: list[str] = []
    body = os.urandom(size)
    publish = lambda: store.publish(f"fill/{len(taken)}", {"a": body}, request="r")
    while (refusal := refused(lambda: taken.append(publish().prefix))) is None:
        assert len(taken) < 1000
    assert f"fill/{len(taken)}" in refusal
    assert "full" in refusal or "free some space" in refusal
    return taken


def refused(write: Callable[[], object]) -> str | None:
    """The error of ``write``, if it has one."""
    try:
        write()
    except StoreError as error:
        return str(error)
    return None


def check_full(store: Store, taken: list[str], large: Path) -> None:
    torn: dict[str, Callable[[], object]] = {
        "new": lambda: store.put_new("new", b"x" * 7_000_000),
        "beat": lambda: store.put_json("beat", {"text": "x" * 7_000_000}),
        "large/": lambda: store.publish("large/", {"large": large}, request="r"),
    }
    for key, write in torn.items():
        with pytest.raises(StoreError, match=key):
            write()
        assert store.list(key.rstrip("/")) == [], key
        assert key.endswith("/") or not store.exists(key)
    assert store.unfinished() == []
    assert not store.published(f"fill/{len(taken)}/")
    for prefix in taken:
        assert store.open_published(prefix).read("a")


@pytest.mark.server
def test_a_full_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight volumes of 64 MB, as small as the server has them."""
    monkeypatch.setattr(s3, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    monkeypatch.setitem(s3._CONFIG, "retries", {"mode": "standard", "total_max_attempts": 1})
    large = tmp_path / "large"
    large.write_bytes(bytes(101 * 2**20))
    (tmp_path / "server").mkdir()
    with seaweedfs(tmp_path / "server", volumes=8) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        store = open_store("s3://forge/full")
        taken = fill(store, 2 * PIECE)
        assert len(taken) * 2 * PIECE > 200 * 2**20
        check_full(store, taken, large)
        assert main(["du", "--store", store.uri]) == 0


@pytest.fixture
def disk(small_disk: Callable[[int], Path]) -> Path:
    return small_disk(16)


@pytest.mark.server
def test_a_full_disk(disk: Path, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(bytes(20 * 2**20))
    store = open_store(str(disk / "store"))
    taken = fill(store, 1_000_000)
    assert len(taken) >= 14
    check_full(store, taken, large)
    assert list((disk / "store/.tmp").iterdir()) == []
    for prefix in taken[:8]:
        for key in store.list(prefix):
            store.delete(key)
    assert store.put_new("new", b"x" * 7_000_000)


@pytest.mark.server
def test_room_is_made_on_a_full_disk_with_gc_and_rm(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(disk / "store"))
    settings = {"run": {"id": RUN}, "steps": 9, "weights": {"keep": 1}, "max_staleness": 0, "gc": {"grace": 0}}
    create_run(store, load_config({**settings, "rewards": {"functions": [{"path": "exact_match"}]}}))
    ledger = committed(store, 4)
    for version in range(5):
        store.publish(ledger.weights_prefix(version), {"model": bytes(1_000_000)}, request="r")
    fill(store, 1_000_000)
    for number in range(10_000):  # the last blocks too
        if refused(partial(store.put_new, f"last/{number}", b"x" * 4096)) is not None:
            break
    assert main(["gc", RUN, "--store", store.uri]) == 0
    assert len(store.folders(f"runs/{RUN}/weights")) == 2
    assert main(["rm", RUN, "--yes", "--store", store.uri]) == 0
    assert store.folders("runs") == []
    assert store.put_new("new", b"x" * 4_000_000)


@pytest.mark.server
def test_a_collection_that_finds_no_room_for_its_tombstones_deletes_what_is_due(disk: Path) -> None:
    store = open_store(str(disk / "store"))
    settings = {"run": {"id": RUN}, "steps": 9, "weights": {"keep": 1}, "max_staleness": 0, "gc": {"grace": 0.5}}
    create_run(store, load_config({**settings, "rewards": {"functions": [{"path": "exact_match"}]}}))
    ledger = committed(store, 3)
    for version in range(4):
        store.publish(ledger.weights_prefix(version), {"model": bytes(1_000_000)}, request="r")
    record = load_run(store, RUN)
    collect_garbage(store, record)
    time.sleep(0.6)
    fill(store, 1_000_000)
    assert len(collect_garbage(store, record).garbage) == 2
