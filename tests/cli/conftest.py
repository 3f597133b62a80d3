"""The ``forge`` command as a user has it: in a folder of its own, in this process or in another one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.cli import main

FORGE = Path(sys.executable).with_name("forge")


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


Forge = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; the default store lies in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORGE_STORE", raising=False)
    return tmp_path


@pytest.fixture
def forge(folder: Path, capsys: pytest.CaptureFixture[str]) -> Forge:
    """Run a command in this process."""

    def forge(*argv: str) -> Result:
        capsys.readouterr()
        try:
            status = main(argv)
        except SystemExit as end:  # argparse ends --help and wrong flags itself
            status = end.code if isinstance(end.code, int) else 1
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return forge


def run_forge(folder: Path, *argv: str, **environment: str) -> Result:
    """Run a command as another process, in ``folder``."""
    done = subprocess.run(
        [str(FORGE), *argv],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    return Result(done.returncode, done.stdout, done.stderr)
