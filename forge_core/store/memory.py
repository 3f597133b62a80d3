"""The store in the memory of this process (``memory://name``), for tests: one lock makes every operation atomic.

Stores of one name share their objects, in all threads of the process and in no other process. ``clock`` is that of
the service: a test may turn it.
"""

from __future__ import annotations

import builtins
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fsspec.implementations.memory import MemoryFileSystem

from forge_core.store.backend import Unfinished
from forge_core.store.errors import NotFound

_LOCK = threading.RLock()  # fsspec keeps one process-wide dictionary for all memory file systems
_written: dict[str, float] = {}  # path -> when, likewise


class MemoryBackend:
    longest_poll_s = 0.05
    folder: Path | None = None
    clock: Callable[[], float] = staticmethod(time.time)

    def __init__(self, name: str) -> None:
        self.uri = f"memory://{name}"
        self._root = f"/{name}"
        self._fs = MemoryFileSystem()

    def create(self, path: str, body: bytes, nonce: str) -> bool:
        with _LOCK:
            if self.exists(path):
                return False
            self.write(path, body)
            return True

    def write(self, path: str, data: bytes | Path, *, given: bool = False) -> None:
        body = data.read_bytes() if isinstance(data, Path) else data
        with _LOCK:
            self._fs.pipe_file(f"{self._root}/{path}", body)
            _written[f"{self._root}/{path}"] = self.now()

    def read(self, path: str) -> bytes:
        with _LOCK:
            if not self.exists(path):
                raise NotFound(self.uri, path)
            return self._fs.cat_file(f"{self._root}/{path}")

    def read_range(self, path: str, start: int, end: int) -> bytes:
        with _LOCK:
            if not self.exists(path):
                raise NotFound(self.uri, path)
            return self._fs.cat_file(f"{self._root}/{path}", start, end)

    def download(self, path: str, target: Path) -> None:
        target.write_bytes(self.read(path))

    def exists(self, path: str) -> bool:
        with _LOCK:
            return self._fs.isfile(f"{self._root}/{path}")

    def list(self, folder: str) -> dict[str, int]:
        below = f"{self._root}/{folder}/" if folder else f"{self._root}/"
        with _LOCK:
            files = [(path, file.size) for path, file in self._fs.store.items() if path.startswith(below)]
        return {path.removeprefix(f"{self._root}/"): size for path, size in sorted(files)}

    def total(self) -> int:
        return sum(self.list("").values())

    def folders(self, folder: str) -> builtins.list[str]:
        below = f"{folder}/" if folder else ""
        names = (path.removeprefix(below).partition("/") for path in self.list(folder))
        return sorted({name for name, inside, _ in names if inside})

    def delete(self, path: str) -> None:
        with _LOCK:
            if self.exists(path):
                self._fs.rm_file(f"{self._root}/{path}")
                _written.pop(f"{self._root}/{path}", None)

    def now(self) -> float:
        return self.clock()

    def written_at(self, path: str) -> float:
        with _LOCK:
            if not self.exists(path):
                raise NotFound(self.uri, path)
            return _written[f"{self._root}/{path}"]

    def unfinished(self) -> builtins.list[Unfinished]:
        return []

    def discard(self, unfinished: Unfinished) -> None:
        raise AssertionError("nothing in memory is unfinished")
