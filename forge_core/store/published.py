"""A published object: its manifest, and its files by their plain names, which are never returned damaged."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from forge_core.store.backend import Backend
from forge_core.store.digests import data_digest
from forge_core.store.errors import CorruptObject, NotFound
from forge_core.store.manifest import MANIFEST, File, Manifest

READERS = 8  # files that are copied and checked at the same time
Data = TypeVar("Data", bytes, Path)


class Opener(Protocol):
    """What opens published objects: a store, or who remembers what it read there."""

    def open_published(self, prefix: str, *, request: str | None = None) -> Published: ...


class Published:
    """See the module."""

    def __init__(self, backend: Backend, manifest: Manifest) -> None:
        self._backend = backend
        self.manifest = manifest

    @property
    def files(self) -> list[str]:
        return [file.name for file in self.manifest.files]

    def read(self, name: str) -> bytes:
        """The content of the file ``name``. Raises KeyError, and CorruptObject when it is not what was published."""
        file = self.manifest.file(name)
        with self._listed(file):
            data = self._backend.read(file.key)
        return self.checked(file, data)

    def read_range(self, file: File, start: int, end: int) -> bytes:
        """Bytes ``start`` to ``end`` (exclusive) of ``file``; the caller has them ``checked`` when all are there.
        Raises CorruptObject when the stored file ends before."""
        with self._listed(file):
            data = self._backend.read_range(file.key, start, end)
        if len(data) != end - start:
            raise self._damaged(file, f"it ends after {start + len(data)} bytes")
        return data

    def copy_to(self, folder: Path) -> None:
        """Put all files into ``folder`` (as hard links where possible), digests checked, several files at a time.
        Raises CorruptObject."""
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(lambda file: self.checked(file, self._put(folder, file)), self.manifest.files))

    def check(self, folder: Path) -> None:
        """Raises CorruptObject unless the files of ``folder`` are what was published; several at a time."""
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(lambda file: self.checked(file, folder / file.name), self.manifest.files))

    def link_to(self, folder: Path) -> None:
        """``copy_to`` without reading what it links: ``check`` does."""
        for file in self.manifest.files:
            self._put(folder, file)

    def _put(self, folder: Path, file: File) -> Path:
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._listed(file):
            self._backend.download(file.key, target)
        return target

    def checked(self, file: File, data: Data) -> Data:
        """``data`` (bytes, or a local copy) when it is what was published as ``file``. Raises CorruptObject."""
        sha256, size = data_digest(data)
        if (sha256, size) != (file.sha256, file.size):
            raise self._damaged(file, f"it has {size} bytes with sha256 {sha256}")
        return data

    def _damaged(self, file: File, found: str) -> CorruptObject:
        return CorruptObject(
            f"{file.key} in the store {self._backend.uri} is damaged: {found}, its manifest says {file.size} bytes and "
            f"{file.sha256}: restore it, or delete {self.manifest.prefix}{MANIFEST} to have it made again"
        )

    @contextmanager
    def _listed(self, file: File) -> Iterator[None]:
        try:
            yield
        except NotFound as error:
            raise CorruptObject(
                f"{file.key} in the store {self._backend.uri} is missing although the manifest of "
                f"{self.manifest.prefix} lists it: restore it, or delete that manifest to have it made again"
            ) from error
