"""Temporary folders that a killed process leaves to the next one.

- Whoever has one holds it locked; the lock is the kernel's, so ``kill -9`` frees it.
- ``remove_abandoned`` removes those that nobody holds: whoever makes a folder or opens a run calls it. A folder that is
  still being made cannot be taken for one: its maker makes another when it finds that the folder is gone once it has
  the lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "forge-temporary-"


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """A new folder, named after its ``purpose``, that is removed in the end."""
    remove_abandoned()
    folder, lock = _locked_folder(f"{PREFIX}{purpose}-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned() -> None:
    """Remove the folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with suppress(OSError):  # another user's, held, or just removed by another process
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)


def _locked_folder(prefix: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)
