"""The store as a file system of DuckDB, for stores whose objects are no files of this host. Read-only.

Invariant: sizes come from the listing that found the files, so opening one costs no request; small files are read
whole, large ones in the ranges that a query needs.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fsspec import AbstractFileSystem

from forge_core.store import Store

WHOLE = 4 * 1024 * 1024  # bytes: up to here one request is cheaper than several
PROTOCOL = "forge"


class StoreFiles(AbstractFileSystem):
    """``forge://<key>`` for the keys whose ``sizes`` are known; more may be added."""

    protocol = PROTOCOL
    cachable = False

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._sizes: dict[str, int] = {}

    def add(self, sizes: Mapping[str, int]) -> list[str]:
        """Make files known; their names."""
        self._sizes |= sizes
        return [f"{PROTOCOL}://{key}" for key in sizes]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        key = self._strip_protocol(path)
        if key not in self._sizes:
            raise FileNotFoundError(key)
        return {"name": key, "size": self._sizes[key], "type": "file"}

    def modified(self, path: str) -> datetime:
        return datetime(2000, 1, 1, tzinfo=UTC)  # objects never change

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        key = self._strip_protocol(path)
        return [self.info(key) if detail else key]

    def glob(self, path: str, **_: Any) -> list[str]:
        return [self._strip_protocol(path)]  # names are never patterns here

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode != "rb":
            raise PermissionError(f"{path}: the store is read, not written")
        key = self._strip_protocol(path)
        size = self.info(key)["size"]
        return (
            io.BytesIO(self._store.read(key))
            if size <= WHOLE
            else io.BufferedReader(_Ranges(self._store, key, size), WHOLE)
        )


class _Ranges(io.RawIOBase):
    def __init__(self, store: Store, key: str, size: int) -> None:
        self._store, self._key, self._size, self._at = store, key, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._size, self._at + len(buffer))
        if end <= self._at:
            return 0
        data = self._store.read_range(self._key, self._at, end)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
