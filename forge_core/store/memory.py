"""The store in the memory of this process (``memory://name``), for tests: one lock makes every operation atomic.

Stores of one name share their objects, in all threads of the process and in no other process.
"""

from __future__ import annotations

import builtins
import tempfile
import threading
from pathlib import Path

from fsspec.implementations.memory import MemoryFileSystem

from forge_core.store.errors import NotFound

_LOCK = threading.RLock()  # fsspec keeps one process-wide dictionary for all memory file systems


class MemoryBackend:
    longest_poll_s = 0.05
    folder: Path | None = None

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

    def write(self, path: str, data: bytes | Path) -> None:
        body = data.read_bytes() if isinstance(data, Path) else data
        with _LOCK:
            self._fs.pipe_file(f"{self._root}/{path}", body)

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

    def list(self, folder: str) -> builtins.list[str]:
        with _LOCK:
            paths = tuple(self._fs.store)
        below = f"{self._root}/{folder}/" if folder else f"{self._root}/"
        return sorted(path.removeprefix(f"{self._root}/") for path in paths if path.startswith(below))

    def delete(self, path: str) -> None:
        with _LOCK:
            if self.exists(path):
                self._fs.rm_file(f"{self._root}/{path}")

    def cache_root(self) -> Path:
        return Path(tempfile.gettempdir())
