"""Temporary files of a child group go with it, whatever ends it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_core.processes import ChildDied, ChildGroup

WRITE = "import tempfile, time; tempfile.mkdtemp(); print('written', flush=True); time.sleep(600)"
OWNER = """
import sys, time
from pathlib import Path
from forge_core.processes import ChildGroup
ChildGroup("writer", [sys.executable, "-c", sys.argv[2]], log=Path(sys.argv[1]))
time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def wait_for_file(log: Path, folder: Path) -> None:
    deadline = time.monotonic() + 20
    while not log.exists() or "written" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert list(folder.glob("*/*")), "it has written a temporary file"


def gone(folder: Path) -> bool:
    deadline = time.monotonic() + 10
    while os.listdir(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not os.listdir(folder)


def test_temporary_files_go_with_the_command(tmp_path: Path, temporary: Path) -> None:
    group = ChildGroup("writer", [sys.executable, "-c", WRITE], log=tmp_path / "log")
    wait_for_file(tmp_path / "log", temporary)
    group.kill()
    assert os.listdir(temporary) == []


def test_temporary_files_go_when_the_owner_is_killed(tmp_path: Path, temporary: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "log"), WRITE])
    wait_for_file(tmp_path / "log", temporary)
    owner.kill()
    owner.wait()
    assert gone(temporary)


def test_a_command_that_does_not_start_leaves_no_folder(tmp_path: Path, temporary: Path) -> None:
    with pytest.raises(ChildDied):
        ChildGroup("missing", [str(tmp_path / "missing")], log=tmp_path / "log")
    assert os.listdir(temporary) == []
