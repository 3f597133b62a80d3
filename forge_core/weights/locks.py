"""Locks between the processes of a host: ``flock`` on small files, released by the kernel when their holder dies.

The holder of an exclusive lock may unlink its file: whoever gets the lock of a file that is no longer there tries
again. Two opens of one file exclude each other in one process too.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forge_core.store.store import Stop

POLL_S = 0.02


@contextmanager
def exclusive(path: Path, stop: Stop | None = None) -> Iterator[None]:
    """Hold ``path`` alone; waits for its holder, unless ``stop`` is set (Stopped)."""
    while (lock := _try(path)) is None:
        if stop is None:
            time.sleep(POLL_S)
        else:
            stop.check()
            stop.wait(POLL_S)
    try:
        yield
    finally:
        _release(lock)


@contextmanager
def exclusive_if_free(path: Path) -> Iterator[bool]:
    """Hold ``path`` alone when nobody else holds it; says whether it does."""
    lock = _try(path)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            _release(lock)


def shared(path: Path) -> int:
    """A descriptor that holds ``path`` together with others until it is closed. Nobody may unlink ``path`` now."""
    lock = _open(path)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def is_held(path: Path) -> bool:
    """Whether anybody, this process included, holds ``path`` at this moment."""
    if not path.exists():
        return False
    lock = _open(path)
    try:
        return not _lock(lock)
    finally:
        os.close(lock)


def _try(path: Path) -> int | None:
    lock, mine = _open(path), False
    try:
        mine = _lock(lock) and _is_at(lock, path)
    finally:
        if not mine:
            os.close(lock)
    return lock if mine else None


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release(lock: int) -> None:
    """Closing alone would leave it to processes that were forked meanwhile."""
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _is_at(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False
