"""Temporary folders: gone with a process that ends, and with the next one after a process that is killed."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_core.temporary import _own_folder, temporary_folder

HOLD = """
import sys, time
from forge_core.temporary import temporary_folder
with temporary_folder("weights") as folder:
    (folder / "part").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


class Holder:
    """A process with a temporary folder."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=-1, stdout=-1, text=True)
        assert self.process.stdout is not None
        self.folder = Path(self.process.stdout.readline().strip())
        assert self.folder.is_dir()

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture
def holders(parent: Path) -> Iterator[tuple[Holder, Holder]]:
    pair = Holder(), Holder()
    yield pair
    for holder in pair:
        holder.end()


def test_a_process_leaves_nothing_when_it_ends(parent: Path) -> None:
    holder = Holder()
    assert parent in holder.folder.parents
    holder.end()
    assert holder.process.returncode == 0
    assert os.listdir(parent) == []


def test_the_next_process_removes_what_a_killed_one_left_and_nothing_of_a_living_one(
    parent: Path, holders: tuple[Holder, Holder]
) -> None:
    killed, living = holders
    killed.process.kill()
    killed.process.wait()
    assert killed.folder.exists()
    assert living.folder.exists()
    with temporary_folder("checkpoint") as own:
        assert not killed.folder.parent.exists()
        assert living.folder.exists()
        assert own.name.startswith("checkpoint-")
    assert not own.exists()


def test_processes_that_start_together_take_no_folder_from_each_other(parent: Path) -> None:
    with multiprocessing.get_context("fork").Pool(8) as pool:
        kept = pool.map(_keeps_its_folder, range(400), chunksize=1)
    assert all(kept)


def _keeps_its_folder(number: int) -> bool:
    _own_folder.cache_clear()
    with temporary_folder(str(number)) as own:
        return own.is_dir()


def test_a_forked_child_has_a_folder_of_its_own(parent: Path) -> None:
    with temporary_folder("weights") as own:
        child = multiprocessing.get_context("fork").Process(target=_elsewhere, args=(own.parent,))
        child.start()
        child.join()
        assert child.exitcode == 0
        assert own.exists(), "the child's end removes nothing of its parent"


def _elsewhere(folder: Path) -> None:
    with temporary_folder("weights") as own:
        assert own.parent != folder
