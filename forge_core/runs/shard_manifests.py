"""The manifests of the shards that this process works on, each read once.

Invariants:
- A manifest does not change once it is there, so the stages of a process share what the first of them has read or
  made. Their files are read from the store, and checked against it, as ever.
- Only the newest ``batches`` batches are kept. What is not kept is read again, so nothing rests on what is.
"""

from __future__ import annotations

import threading

from forge_core.store import Manifest, Store
from forge_core.store.published import Published


class ShardManifests:
    """Opens shards of ``store``. May be used from many threads."""

    def __init__(self, store: Store, batches: int) -> None:
        self._store, self._batches = store, batches
        self._kept: dict[int, dict[str, Manifest]] = {}  # by batch, then prefix
        self._lock = threading.Lock()

    def open_published(self, prefix: str, *, request: str | None = None) -> Published:
        """As ``Store.open_published``."""
        with self._lock:
            manifest = self._kept.get(_batch(prefix), {}).get(prefix)
        if manifest is None:
            manifest = self.keep(self._store.open_published(prefix).manifest)
        return self._store.described(manifest, request=request)

    def keep(self, manifest: Manifest) -> Manifest:
        """Remember the ``manifest`` of a shard, and return it."""
        with self._lock:
            self._kept.setdefault(_batch(manifest.prefix), {})[manifest.prefix] = manifest
            while len(self._kept) > self._batches:
                del self._kept[min(self._kept)]
        return manifest


def _batch(prefix: str) -> int:
    """Of ``runs/<run_id>/<kind>/<batch>/<round>-<shard>/``."""
    return int(prefix.split("/")[-3])
