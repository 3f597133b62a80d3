"""Temporary folders that a killed process leaves to the next one.

- All of a process lie in one folder below the system's, which the process holds locked as long as it lives; the lock is
  the kernel's, so ``kill -9`` frees it.
- A process that makes its folder removes those of this user that nobody holds. A folder that is still being made cannot
  be taken for one: its maker makes another when it finds that the folder is gone once it has the lock.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

PREFIX = "forge-temporary-"


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """A new folder, named after its ``purpose``, that is removed in the end."""
    own = _own_folder(os.getpid(), tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix=f"{purpose}-", dir=own) as folder:
        yield Path(folder)


@lru_cache(maxsize=1)  # a fork and a new TMPDIR need another
def _own_folder(pid: int, parent: str) -> Path:
    _remove_abandoned(Path(parent))
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                atexit.register(_remove, folder, pid)
                return folder
            os.close(lock)


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(PREFIX + "*"):
        with suppress(OSError):  # another user's, held, or just removed by another process
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)
