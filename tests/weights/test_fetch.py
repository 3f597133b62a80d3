"""Range reads, and what is made of them: whole files with the published digests, or an error with the key."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from forge_core.stop import Stopped, StopToken
from forge_core.store import CorruptObject, NotFound, Store
from forge_core.weights import fetch as fetching
from forge_core.weights.fetch import fetch
from tests.store.faulty_proxy import Fault, FaultyProxy
from tests.weights.objects import published


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "RANGE_BYTES", 100)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def test_a_range_is_a_slice_that_ends_with_the_object(store: Store) -> None:
    store.put_new("a/b", b"0123456789")
    ranges = ((0, 4), (3, 7), (0, 10), (8, 20), (10, 20), (15, 20))
    assert [store.read_range("a/b", *r) for r in ranges] == [b"0123", b"3456", b"0123456789", b"89", b"", b""]
    with pytest.raises(NotFound):
        store.read_range("a/c", 0, 4)


def test_files_come_back_whole_under_their_plain_names_and_read_only(store: Store, folder: Path) -> None:
    files = {"sub/model.safetensors": bytes(range(256)) * 5, "exact": b"x" * 200, "small": b"y", "empty": b""}
    fetch(store, store.publish("w/1", files, request="r"), folder, fetchers=4)
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert {name: path.read_bytes() for name, path in found.items()} == files
    assert {path.stat().st_mode & 0o222 for path in found.values()} == {0}


def test_files_of_a_local_store_are_linked(tmp_path: Path, folder: Path) -> None:
    from forge_core.store import open_store

    store = open_store(str(tmp_path / "store"))
    manifest = published(store)
    fetch(store, manifest, folder, fetchers=4)
    for file in manifest.files:
        assert (folder / file.name).samefile(tmp_path / "store" / file.key)


@pytest.mark.parametrize("change", [lambda body: body[:150], lambda body: b"?" + body[1:], None])
def test_torn_changed_and_missing_files_are_named(store: Store, folder: Path, change) -> None:
    manifest = published(store)
    file = manifest.files[1]
    body = store.read(file.key)
    store.delete(file.key)
    if change is not None:
        store.put_new(file.key, change(body))
    with pytest.raises(CorruptObject, match=r"is damaged|is missing although") as caught:
        fetch(store, manifest, folder, fetchers=4)
    assert file.key in str(caught.value)


def test_a_set_stop_ends_the_fetch_at_the_next_range(memory: Store, folder: Path) -> None:
    stop = StopToken()
    stop.set("test")
    with pytest.raises(Stopped):
        fetch(memory, published(memory), folder, fetchers=2, stop=stop)


@pytest.mark.server
def test_a_range_that_fails_for_a_passing_reason_is_read_again(
    proxied: tuple[FaultyProxy, Store], folder: Path
) -> None:
    proxy, store = proxied
    manifest = published(store)
    proxy.faults = [Fault("GET", "model", False, 503), Fault("GET", "model", False), Fault("GET", "model", False, 500)]
    fetch(store, manifest, folder, fetchers=4)
    assert proxy.faults == []
    assert (folder / "model-1.safetensors").read_bytes() == b"1" * 1000


@pytest.mark.server
def test_as_many_ranges_are_in_flight_as_there_are_fetchers(proxied: tuple[FaultyProxy, Store], folder: Path) -> None:
    proxy, store = proxied
    manifest = published(store)
    proxy.gate.clear()  # every range waits, so those that were asked for are all open
    worker = threading.Thread(target=fetch, args=(store, manifest, folder, 6))
    worker.start()
    for _ in range(200):
        if proxy.ranges_at_once == 6:
            break
        worker.join(0.05)
    proxy.gate.set()
    worker.join(30)
    assert proxy.ranges_at_once == 6
    assert len(proxy.ranges) == 10 + 11 + 1
