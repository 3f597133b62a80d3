"""Fetching a published object into a local folder with many range reads at once.

Guarantees:
- ``fetch`` returns only when every file of the manifest lies in the folder under its plain name with the published
  sha256; a file that is torn, damaged or missing in the store is a ``CorruptObject`` that names its key.
- At most ``fetchers`` ranges are in flight. A range that fails for a passing reason is repeated by the backend.
- Space is taken before the first byte is read, so a full disk is found at once.
- From a store of plain files nothing travels: the files are hard links where the file system allows it.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from forge_core.store.manifest import File, Manifest
from forge_core.store.published import Published
from forge_core.store.store import Stop, Store

RANGE_BYTES = 16 * 1024 * 1024


def fetch(store: Store, manifest: Manifest, folder: Path, fetchers: int, stop: Stop | None = None) -> None:
    """Put the files of ``manifest`` into the empty ``folder``. Raises CorruptObject, StoreError, OSError (no space),
    and Stopped when ``stop`` is set."""
    published = store.described(manifest)
    if store.folder is not None:
        published.copy_to(folder)
        return
    targets = [_Target(published, file, folder / file.name) for file in manifest.files]
    with ThreadPoolExecutor(fetchers, thread_name_prefix="weights-fetcher") as pool:
        futures = [
            pool.submit(target.fetch, start, stop)
            for target in targets
            for start in range(0, max(target.file.size, 1), RANGE_BYTES)
        ]
        _finish(pool, futures)


def _finish(pool: ThreadPoolExecutor, futures: list[Future[None]]) -> None:
    """Wait for all; after the first failure nothing further is started."""
    try:
        for future in as_completed(futures):
            future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Target:
    """One file that is being fetched; whoever brings its last range checks its digest."""

    def __init__(self, published: Published, file: File, path: Path) -> None:
        self.file = file
        self._published, self._path = published, path
        self._missing, self._lock = file.size, threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        _preallocate(path, file.size)

    def fetch(self, start: int, stop: Stop | None) -> None:
        if stop is not None:
            stop.check()
        end = min(start + RANGE_BYTES, self.file.size)
        if end > start:
            self._write(start, self._published.read_range(self.file, start, end))
        with self._lock:
            self._missing -= end - start
            complete = self._missing == 0
        if complete:
            self._published.checked(self.file, self._path)
            self._path.chmod(0o444)

    def _write(self, start: int, data: bytes) -> None:
        with self._path.open("r+b") as file:
            file.seek(start)
            file.write(data)


def _preallocate(path: Path, size: int) -> None:
    with path.open("xb") as file:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
