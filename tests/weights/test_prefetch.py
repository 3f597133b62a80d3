"""Weights are there when they are asked for: fetched ahead, again when that failed, and kept while they may be used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forge_core.stop import Stopped, StopToken
from forge_core.store import CorruptObject, Manifest, Store, local, open_store
from forge_core.weights.prefetch import LEASES, Prefetcher
from tests.weights.objects import delete, published, until

Make = Callable[..., Prefetcher]


@pytest.fixture
def make(memory: Store) -> Iterator[Make]:
    made: list[Prefetcher] = []

    def prefetcher(find: Callable[[int], Manifest] | None = None, enabled: bool = True) -> Prefetcher:
        find = find or (lambda version: published(memory, version))
        made.append(Prefetcher(memory, find, 2, enabled=enabled, stop=StopToken()))
        return made[-1]

    yield prefetcher
    for each in made:
        each.close()


def cached(tmp_path: Path) -> list[Path]:
    """The folders that are complete now."""
    return [path for path in tmp_path.glob("weights-cache/*/*") if path.is_dir() and not path.suffix]


def test_a_prefetched_version_needs_the_store_no_longer(memory: Store, make: Make, tmp_path: Path) -> None:
    weights = make()
    weights.prefetch(1)
    until(lambda: cached(tmp_path))
    delete(memory, published(memory, 1))
    assert (weights.folder(1) / "model-1.safetensors").read_bytes() == b"1" * 1000


def test_a_version_that_is_being_prefetched_is_waited_for(memory: Store, make: Make, tmp_path: Path) -> None:
    go, finds = threading.Event(), []

    def find(version: int) -> Manifest:
        finds.append(threading.current_thread().name)
        if len(finds) == 1:
            go.wait(10)
        return published(memory, version)

    weights = make(find)
    weights.prefetch(1)
    weights.prefetch(1)
    until(lambda: finds)
    threading.Timer(0.2, go.set).start()
    started = time.monotonic()
    assert weights.folder(1) in cached(tmp_path)
    assert time.monotonic() - started > 0.1
    assert finds == ["prefetch-1", "MainThread"]


def test_a_version_is_prefetched_once_however_often_it_is_asked_for(memory: Store, make: Make, tmp_path: Path) -> None:
    finds: list[int] = []

    def find(version: int) -> Manifest:
        finds.append(version)
        return published(memory, version)

    weights = make(find)
    for _ in range(3):
        weights.prefetch(1)
        until(lambda: not weights._prefetches)
    assert finds == [1]
    weights.prefetch(2)
    until(lambda: finds == [1, 2])


def test_a_failed_prefetch_is_repeated_by_who_needs_it_and_its_error_raised_there(memory: Store, make: Make) -> None:
    weights, manifest = make(), published(memory, 1)
    file = manifest.files[1]
    body = memory.read(file.key)
    memory.delete(file.key)
    weights.prefetch(1)
    with pytest.raises(CorruptObject, match="is missing although"):
        weights.folder(1)
    weights.prefetch(1)
    until(lambda: not weights._prefetches)
    memory.put_new(file.key, body)
    assert weights.folder(1).is_dir()


def test_prefetching_can_be_turned_off(make: Make, tmp_path: Path) -> None:
    weights = make(enabled=False)
    weights.prefetch(1)
    time.sleep(0.1)
    assert cached(tmp_path) == []
    assert weights.folder(1) in cached(tmp_path)


def test_folders_asked_for_last_and_pinned_ones_survive_other_versions(make: Make) -> None:
    weights, others = make(), make()
    pinned = weights.folder(0, pin=True)
    mine = [weights.folder(version) for version in range(1, LEASES + 2)]
    for version in range(10, 20):
        others.folder(version)
    others.close()
    assert [folder.is_dir() for folder in [pinned, *mine]] == [True, False, *[True] * LEASES]


def test_closing_empties_the_cache_and_what_is_asked_for_then_is_fetched_anew(make: Make, tmp_path: Path) -> None:
    weights = make()
    weights.folder(0, pin=True)
    weights.folder(1)
    weights.close()
    assert cached(tmp_path) == []
    assert weights.folder(1).is_dir()


def test_a_run_that_stops_ends_the_fetch(memory: Store) -> None:
    stop = StopToken()
    weights = Prefetcher(memory, lambda version: published(memory, version), 2, enabled=True, stop=stop)
    stop.set("test")
    with pytest.raises(Stopped):
        weights.folder(1)


def test_an_export_made_in_scratch_is_the_versions_folder(memory: Store, make: Make, tmp_path: Path) -> None:
    weights = make()
    with weights.scratch() as folder:
        assert tmp_path in folder.parents
        (folder / "model.safetensors").write_bytes(b"trained")
        manifest = memory.publish(
            "weights/00000005-a", {"model.safetensors": folder / "model.safetensors"}, request="r"
        )
        weights.adopt(manifest, folder)
    (adopted,) = cached(tmp_path)
    assert (adopted / "model.safetensors").read_bytes() == b"trained"


def test_what_is_exported_for_a_store_of_plain_files_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever file system temporary files are on: publishing and adopting are links."""
    monkeypatch.delenv("FORGE_WEIGHTS_CACHE", raising=False)
    store = open_store(str(tmp_path / "store"))
    written: list[str] = []
    write = local._write

    def noted(data: bytes | Path, target: Path) -> None:
        written.extend([data.name] if isinstance(data, Path) else [])
        write(data, target)

    monkeypatch.setattr(local, "_write", noted)
    weights = Prefetcher(store, lambda version: published(store, version), 2, enabled=True, stop=StopToken())
    with weights.scratch() as folder:
        assert folder.is_relative_to(tmp_path / "store"), "nothing can be linked from another file system"
        (folder / "model.safetensors").write_bytes(b"trained")
        files = store.upload("weights/00000005-a", {"model.safetensors": folder / "model.safetensors"}, given=True)
        manifest = store.publish_uploaded("weights/00000005-a", files, request="r")
        weights.adopt(manifest, folder)
    assert not [name for name in written if name.endswith(".safetensors")]
    assert not folder.exists()
    weights = Prefetcher(store, lambda version: manifest, 2, enabled=True, stop=StopToken())
    assert (weights.folder(5) / "model.safetensors").read_bytes() == b"trained"
    weights.close()
