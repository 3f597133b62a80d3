"""Local folders that hold published objects under plain file names, for engines that load from a disk.

- A folder is complete and checked before anybody sees it, and is made once per object and process.
- The ``KEEP`` folders that were asked for last stay, and pinned ones for the life of the process. Files that an engine
  has open survive the removal of their folder.
- Everything lies in one folder of this process, which goes when the process ends; after a kill, the next process that
  uses the same place removes it (its owner no longer holds the lock file).
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

KEEP = 4
LOCK_FILE = "owner.lock"
_CACHES: dict[tuple[int, Path], LocalCache] = {}
_CACHES_LOCK = threading.Lock()


def local_cache(root: Path) -> LocalCache:
    """The cache of this process below ``root``."""
    with _CACHES_LOCK:
        return _CACHES.setdefault((os.getpid(), root), LocalCache(root))


class LocalCache:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._home: Path | None = None
        self._lock = threading.Lock()
        self._folders: OrderedDict[str, Path] = OrderedDict()
        self._pinned: set[str] = set()

    def folder(self, identity: str, fill: Callable[[Path], None], *, pin: bool = False) -> Path:
        """The folder of ``identity``, made by ``fill(empty folder)`` when it is not there; ``pin`` keeps it."""
        with self._lock:
            if identity not in self._folders:
                self._folders[identity] = self._make(identity, fill)
            folder = self._folders[identity]
            self._folders.move_to_end(identity)
            self._pinned |= {identity} if pin else set()
            for old in [name for name in self._folders if name not in self._pinned][:-KEEP]:
                shutil.rmtree(self._folders.pop(old))
            return folder

    def _make(self, identity: str, fill: Callable[[Path], None]) -> Path:
        self._home = self._home or _make_home(self._root)
        folder = self._home / hashlib.sha256(identity.encode()).hexdigest()[:16]
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        fill(partial)
        partial.rename(folder)
        return folder


def _make_home(root: Path) -> Path:
    """A folder of this process below ``root``, after removing those of processes that are gone."""
    mine = f"forge-cache-{os.getuid()}-"
    root.mkdir(parents=True, exist_ok=True)
    for folder in root.glob(f"{mine}*"):
        if _abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)  # another process may be removing it too
    home = Path(tempfile.mkdtemp(prefix=mine, dir=root))
    handle = os.open(home / "new.lock", os.O_RDWR | os.O_CREAT)  # open, and so locked, for the life of the process
    fcntl.flock(handle, fcntl.LOCK_EX)
    (home / "new.lock").rename(home / LOCK_FILE)
    atexit.register(_remove_home, home, os.getpid())
    return home


def _abandoned(folder: Path) -> bool:
    try:
        handle = os.open(folder / LOCK_FILE, os.O_RDWR)
    except FileNotFoundError:
        return False  # just being made, or removed
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def _remove_home(home: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child runs the parent's exit functions too
        shutil.rmtree(home, ignore_errors=True)
