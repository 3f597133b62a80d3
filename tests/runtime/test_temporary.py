"""Temporary folders: gone with a process that ends, and with the next one after a process that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_core.config import load_config
from forge_core.runs.context import RunContext
from forge_core.runs.record import create_run
from forge_core.store import open_store
from forge_core.temporary import temporary_folder

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
    assert holder.folder.parent == parent
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
        assert not killed.folder.exists()
        assert living.folder.exists()
        assert "checkpoint-" in own.name
    assert not own.exists()


def test_opening_a_run_removes_what_a_killed_process_left(parent: Path, holders: tuple[Holder, Holder]) -> None:
    killed, living = holders
    killed.process.kill()
    killed.process.wait()
    config = load_config(Path(__file__).parents[2] / "configs" / "quickstart.yaml", ["run.id=opened"])
    store = open_store(f"memory://{parent.name}")
    RunContext(store, create_run(store, config)).close()
    assert not killed.folder.exists()
    assert living.folder.exists()


# In a process of its own: this one has threads by now, and a fork of it may go wrong in other people's code.
TOGETHER = """
import multiprocessing
from forge_core.temporary import temporary_folder

def keeps_its_folder(number):
    with temporary_folder(str(number)) as own:
        return own.is_dir()

with multiprocessing.get_context("fork").Pool(8) as pool:
    assert all(pool.map(keeps_its_folder, range(400), chunksize=1))
"""
FORKED = """
import os
from forge_core.temporary import temporary_folder

with temporary_folder("weights") as own:
    if (child := os.fork()) == 0:
        with temporary_folder("weights") as other:
            os._exit(int(other == own))
    assert os.waitpid(child, 0)[1] == 0
    assert own.exists(), "the child's end removes nothing of its parent"
"""


@pytest.mark.parametrize("script", [TOGETHER, FORKED], ids=["together", "forked"])
def test_processes_take_no_folder_from_each_other(parent: Path, script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
