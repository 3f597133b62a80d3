"""One verified folder per object and host: fetched once, never half visible, never removed from under its users."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forge_core.store import CorruptObject, Manifest, Store, open_store
from forge_core.store.manifest import File
from forge_core.weights.host_cache import KEEP, VARIABLE, CacheError, HostCache, Lease, cache_root, lease_published
from tests.store.faulty_proxy import FaultyProxy
from tests.weights.objects import delete, published, until

USER = """
import sys
from pathlib import Path
from forge_core.store import open_store
from forge_core.weights.host_cache import HostCache
store, cache = open_store(sys.argv[1]), HostCache(Path(sys.argv[2]))
manifest = store.open_published(sys.argv[3]).manifest
print("asks", flush=True)
lease = cache.lease(store, manifest, fetchers=3)
print(lease.folder, flush=True)
sys.stdin.read()
"""


ENDS = USER.replace("sys.stdin.read()", "sys.exit(3)")


@contextmanager
def user(store: Store, cache: HostCache, manifest: Manifest) -> Iterator[subprocess.Popen[str]]:
    """Another process that leases ``manifest`` and keeps it; it has begun to ask when this returns."""
    command = [sys.executable, "-c", USER, store.uri, str(cache.root), manifest.prefix]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert line(process) == "asks"
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def lease(cache: HostCache, store: Store, manifest: Manifest) -> Lease:
    return cache.lease(store, manifest, fetchers=2)


def used(cache: HostCache, store: Store, version: int) -> Path:
    """The folder of ``version``, leased and released."""
    found = lease(cache, store, published(store, version))
    found.release()
    return found.folder


def names(cache: HostCache) -> list[str]:
    return sorted(path.name for path in cache.root.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.server
def test_processes_that_want_the_same_weights_fetch_them_once(
    proxied: tuple[FaultyProxy, Store], cache: HostCache
) -> None:
    proxy, store = proxied
    manifest = published(store)
    proxy.gate.clear()
    with user(store, cache, manifest) as one, user(store, cache, manifest) as other:
        until(lambda: len(proxy.ranges) == 3)
        proxy.gate.set()
        assert line(one) == line(other) != ""
    mine = lease(cache, store, manifest)
    assert contents(mine.folder)["model-1.safetensors"] == b"1" * 1000
    assert len(proxy.ranges) == len(manifest.files)


@pytest.mark.server
def test_a_waiting_process_takes_over_from_one_that_is_killed(
    proxied: tuple[FaultyProxy, Store], cache: HostCache
) -> None:
    proxy, store = proxied
    manifest = published(store)
    proxy.gate.clear()
    with user(store, cache, manifest) as one:
        until(lambda: len(proxy.ranges) == 3)
        with user(store, cache, manifest) as other:
            assert not any(path.is_dir() and "." not in path.name for path in cache.root.iterdir())
            one.kill()
            until(lambda: len(proxy.ranges) == 6)
            proxy.gate.set()
            assert contents(Path(line(other)))["model-1.safetensors"] == b"1" * 1000


def test_a_folder_in_use_survives_until_its_process_is_gone(tmp_path: Path, cache: HostCache) -> None:
    store = open_store(str(tmp_path / "store"))
    mine = lease(cache, store, published(store, 1))
    with user(store, cache, published(store, 2)) as process:
        theirs = Path(line(process))
        cache.evict(0, needed=10**18)
        assert mine.folder.is_dir()
        assert theirs.is_dir()
        mine.release()
        cache.leave()  # not the last one
        assert mine.folder.is_dir()
        process.kill()
        process.wait()
    cache.leave()
    assert names(cache) == []


def test_a_process_that_ends_without_a_word_empties_the_cache_if_it_is_the_last(
    tmp_path: Path, cache: HostCache
) -> None:
    store = open_store(str(tmp_path / "store"))
    mine = lease(cache, store, published(store, 1))
    for last in (False, True):
        command = [sys.executable, "-c", ENDS, store.uri, str(cache.root), published(store, 2).prefix]
        assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 3
        assert (names(cache) == []) == last
        mine.release()


def test_files_of_a_store_on_this_disk_are_linked_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    store = open_store(str(tmp_path / "store"))
    manifest = published(store)
    mine = lease_published(store, manifest.prefix)
    for file in manifest.files:
        assert (mine.folder / file.name).samefile(tmp_path / "store" / file.key)
    assert not [key for key in store.list("") if "cache" in key]


def test_two_leases_of_one_process_are_two(memory: Store, cache: HostCache) -> None:
    first, second = (lease(cache, memory, published(memory)) for _ in range(2))
    assert first.folder == second.folder
    first.release()
    cache.evict(0)
    assert second.folder.is_dir()
    second.release()
    cache.evict(0)
    assert names(cache) == []


def test_of_folders_that_nobody_uses_those_used_last_stay(memory: Store, cache: HostCache) -> None:
    folders = [used(cache, memory, version) for version in range(4)]
    assert used(cache, memory, 2) == folders[2]
    cache.evict(KEEP)
    assert [folder.is_dir() for folder in folders] == [False, False, True, True]
    used(cache, memory, 2)
    cache.evict(1)
    assert [folder.is_dir() for folder in folders] == [False, False, True, False]


@pytest.mark.parametrize("change", [lambda body: b"?" + body[1:], lambda body: body[:10], None])
def test_nothing_of_a_damaged_object_is_cached(store: Store, cache: HostCache, change) -> None:
    manifest = published(store)
    file = manifest.files[1]
    body = store.read(file.key)
    store.delete(file.key)
    if change:
        store.put_new(file.key, change(body))
    for _ in range(2):
        with pytest.raises(CorruptObject):
            lease(cache, store, manifest)
        assert not any(path.is_dir() for path in cache.root.iterdir())
    store.delete(file.key)
    store.put_new(file.key, body)
    assert contents(lease(cache, store, manifest).folder)[file.name] == body


def test_a_folder_outlives_the_object_and_one_that_lost_a_file_is_fetched_again(store: Store, cache: HostCache) -> None:
    manifest = published(store)
    folder = lease(cache, store, manifest).folder
    (folder / "config.json").unlink()
    assert lease(cache, store, manifest).folder == folder
    delete(store, manifest)
    assert contents(lease(cache, store, manifest).folder)["config.json"] == b"{}"


def test_leftovers_of_processes_that_were_killed_are_removed(memory: Store, cache: HostCache) -> None:
    for name in ("00000009-dead.partial", "scratch-dead.partial"):
        (cache.root / name).mkdir()
        (cache.root / name / "half").write_bytes(b"x")
        (cache.root / name).with_suffix(".fetch").touch()
    with cache.scratch() as alive:
        used(cache, memory, 1)
        assert alive.is_dir()
    assert not [name for name in names(cache) if "dead" in name or "scratch" in name]


def test_what_others_keep_in_the_folder_under_hidden_names_is_nothing_of_the_cache(
    memory: Store, cache: HostCache
) -> None:
    """A network file system keeps a file that is deleted while it is open as ``.nfs...``."""
    folder = used(cache, memory, 1)
    (cache.root / ".nfs0001.fetch").touch()
    (cache.root / ".DS_Store").touch()
    cache.evict(0)
    assert not folder.exists()
    assert {path.name for path in cache.root.iterdir()} >= {".nfs0001.fetch", ".DS_Store"}
    held = lease(cache, memory, published(memory))
    cache.evict(0)
    assert held.folder.is_dir()


def test_weights_that_do_not_fit_are_refused_with_the_setting(memory: Store, cache: HostCache) -> None:
    older = used(cache, memory, 1)
    in_use = lease(cache, memory, published(memory, 2))
    huge = Manifest("weights/00000003-a/", "r", "c", (File("model.safetensors", "key", 10**17, "0"),))
    with pytest.raises(CacheError, match=rf"weights/00000003-a/ \(1e\+08 GB\) does not fit .* 1 versions.*{VARIABLE}"):
        lease(cache, memory, huge)
    assert (older.is_dir(), in_use.folder.is_dir()) == (False, True)


def exported(cache: HostCache, store: Store, folder: Path) -> Manifest:
    for name, body in (("model.safetensors", b"m" * 500), ("config.json", b"{}")):
        (folder / name).write_bytes(body)
    return store.publish("weights/00000001-a", {path.name: path for path in folder.iterdir()}, request="r")


def test_what_the_trainer_of_this_host_has_published_is_never_fetched(store: Store, cache: HostCache) -> None:
    used(cache, store, 2)
    with cache.scratch() as folder:
        manifest = exported(cache, store, folder)
        inode = (folder / "model.safetensors").stat().st_ino
        cache.adopt(store, manifest, folder)
    cache.evict(1)
    linked = store.folder / manifest.file("model.safetensors").key if store.folder else None
    inode = linked.stat().st_ino if linked else inode
    delete(store, manifest)
    found = lease(cache, store, manifest)
    assert contents(found.folder) == {"model.safetensors": b"m" * 500, "config.json": b"{}"}
    assert (found.folder / "model.safetensors").stat().st_ino == inode  # moved, or linked to the store's: not copied
    assert {path.stat().st_mode & 0o222 for path in found.folder.iterdir()} == {0}


def test_what_the_trainer_of_this_host_has_published_is_checked_before_it_is_used(
    store: Store, cache: HostCache
) -> None:
    with cache.scratch() as folder:
        manifest = exported(cache, store, folder)
        cache.adopt(store, manifest, folder)
    (adopted,) = [path for path in cache.root.iterdir() if path.is_dir() and "." not in path.name]
    damage(adopted / "model.safetensors")
    if store.folder:  # the same file
        with pytest.raises(CorruptObject, match=r"model-\w+.safetensors .* is damaged"):
            lease(cache, store, manifest)
        assert not any(path.is_dir() for path in cache.root.iterdir())
    else:
        assert contents(lease(cache, store, manifest).folder)["model.safetensors"] == b"m" * 500
    assert not [name for name in names(cache) if name.endswith(".unchecked")]


def test_digests_of_what_was_adopted_are_checked_once(
    memory: Store, cache: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cache.scratch() as folder:
        manifest = exported(cache, memory, folder)
        cache.adopt(memory, manifest, folder)
    lease(cache, memory, manifest)
    monkeypatch.setattr("forge_core.store.published.data_digest", None)
    lease(cache, memory, manifest)


def damage(path: Path) -> None:
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"?")
    path.chmod(0o444)


def test_a_folder_that_lacks_files_of_the_object_is_not_adopted(
    memory: Store, cache: HostCache, tmp_path: Path
) -> None:
    (tmp_path / "export").mkdir()
    manifest = exported(cache, memory, tmp_path / "export")
    (tmp_path / "export/config.json").unlink()
    cache.adopt(memory, manifest, tmp_path / "export")
    assert not any(path.is_dir() for path in cache.root.iterdir())
    assert contents(lease(cache, memory, manifest).folder)["config.json"] == b"{}"


def test_the_place_is_the_variables_the_stores_or_shared_memory_if_it_is_large_enough(
    memory: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = open_store(str(tmp_path / "store"))
    assert cache_root(local, 1).parent == cache_root(memory, 1).parent == tmp_path / "weights-cache"
    monkeypatch.delenv(VARIABLE)
    assert cache_root(local, 1).parent == tmp_path / "store/.cache"
    assert cache_root(memory, 1).parent == Path("/dev/shm")
    assert cache_root(memory, 10**17).parent == Path(tempfile.gettempdir())


def test_a_root_that_somebody_else_may_have_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match=f"belongs to another user: .*{VARIABLE}"):
        HostCache(tmp_path / "cache")
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match=f"cannot be made .*{VARIABLE}"):
        HostCache(tmp_path / "file" / "cache")
