"""The store on a disk: atomic files, clear errors, nothing left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forge_core.store import StoreError, open_store

NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root may write everywhere: be somebody else for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_an_unwritable_folder_is_named_with_the_remedy(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o555)
    with (
        unprivileged(),
        pytest.raises(StoreError, match=r"Permission denied .*folder that you may write to.*store=") as e,
    ):
        open_store(str(folder))
    assert str(folder) in str(e.value)


def test_a_file_where_the_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="Not a directory"):
        open_store(str(tmp_path / "file" / "store"))


def test_a_plain_path_and_a_file_uri_are_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_store("./store").put_new("a", b"x")
    store = open_store(f"file://{tmp_path}/store")
    assert store.read("a") == b"x"
    assert store.uri == open_store("store").uri == f"file://{tmp_path}/store"


def test_no_temporary_file_is_left_by_winners_and_losers(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for _ in range(3):
        store.put_new("a", b"x")
        store.publish("b", {"c": b"x"}, request="r")
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_temporary_files_of_a_killed_writer_are_removed_after_a_day(tmp_path: Path) -> None:
    open_store(str(tmp_path)).put_new("a", b"x")
    old, new = tmp_path / ".tmp/old", tmp_path / ".tmp/new"
    for file in (old, new):
        file.write_bytes(b"half written")
    os.utime(old, (time.time() - 100_000, time.time() - 100_000))
    open_store(str(tmp_path))
    assert not old.exists()
    assert new.exists()


def test_stored_files_are_read_only(tmp_path: Path) -> None:
    manifest = open_store(str(tmp_path)).publish("w", {"model": b"x"}, request="r")
    assert (tmp_path / manifest.files[0].key).stat().st_mode & 0o222 == 0


def test_a_store_of_files_loads_neither_an_engine_nor_an_s3_client(tmp_path: Path) -> None:
    script = "import sys; from forge_core.store import open_store; open_store(sys.argv[1]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=True)
    assert not {"torch", "s3fs", "fsspec"} & set(done.stdout.split())


def test_a_file_that_is_given_away_is_linked_and_one_that_is_not_is_copied(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    given, kept = tmp_path / "given", tmp_path / "kept"
    given.write_bytes(b"weights")
    kept.write_bytes(b"weights")
    (linked,) = store.upload("a/", {"x": given}, given=True)
    (copied,) = store.upload("b/", {"x": kept})
    place = lambda file: store.folder / file.key
    assert os.path.samefile(place(linked), given)
    assert not os.path.samefile(place(copied), kept)
    assert [place(file).stat().st_mode & 0o777 for file in (linked, copied)] == [0o444, 0o444]
    assert kept.stat().st_mode & 0o200
    assert not list((store.folder / ".tmp").iterdir())


def test_a_file_that_is_given_away_on_another_file_system_is_copied(tmp_path: Path, monkeypatch) -> None:
    def no_link(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "another file system")

    store, given = open_store(str(tmp_path / "store")), tmp_path / "given"
    given.write_bytes(b"weights")
    monkeypatch.setattr(os, "link", no_link)
    (file,) = store.upload("a/", {"x": given}, given=True)
    assert store.read(file.key) == b"weights"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("s3:/bucket/forge", "s3://bucket/forge"),
        ("s3:bucket", "s3://bucket"),
        ("memory:x", "memory://x"),
        ("file:/data/forge", "file:///data/forge"),
    ],
)
def test_a_mistyped_address_is_no_folder(
    given: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=f"store '{given}': a store's address has two slashes: write {meant}, or"):
        open_store(given)
    assert list(tmp_path.iterdir()) == []
    assert open_store(f"./{given}").uri == f"file://{tmp_path}/{given}"
