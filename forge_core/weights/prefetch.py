"""The weights of one process: prefetched in the background, leased while they may be used.

Invariants:
- ``folder`` returns only complete and verified folders. The ``LEASES`` asked for or prefetched last stay, and pinned
  ones until ``close``.
- A prefetch costs nobody anything when it fails: ``folder`` then fetches again itself, and its error is the caller's.
- ``close`` ends what is being fetched.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from forge_core.stop import StopToken
from forge_core.store.manifest import Manifest
from forge_core.store.store import Store
from forge_core.temporary import temporary_folder
from forge_core.weights.host_cache import CacheError, HostCache, Lease, cache_root, object_size

LEASES = 3
CLOSE_S = 10.0
log = logging.getLogger("forge")


class Prefetcher:
    """``find(version)`` gives the manifest of a version's weights, or raises. ``fetchers``: parallel range reads.
    ``enabled``: whether ``prefetch`` does anything."""

    def __init__(
        self, store: Store, find: Callable[[int], Manifest], fetchers: int, *, enabled: bool, stop: StopToken
    ) -> None:
        self._store, self._find, self._fetchers, self._enabled = store, find, fetchers, enabled
        self._stop = _Stops(stop)
        self._lock = threading.Lock()
        self._caches: dict[Path, HostCache] = {}
        self._leases: OrderedDict[Path, Lease] = OrderedDict()
        self._pinned: dict[Path, Lease] = {}
        self._prefetches: dict[int, threading.Event] = {}  # under way
        self._begun: set[int] = set()

    def prefetch(self, version: int) -> None:
        """Begin to fetch ``version``, unless that was begun before; returns at once. A process that waits for something
        may call it again and again."""
        with self._lock:
            if not self._enabled or version in self._begun:
                return
            self._begun.add(version)
            done = self._prefetches[version] = threading.Event()
        threading.Thread(target=self._prefetch, args=(version, done), name=f"prefetch-{version}", daemon=True).start()

    def folder(self, version: int, *, pin: bool = False) -> Path:
        """The folder of ``version``: waits for its prefetch, or fetches it. Raises CorruptObject, StoreError,
        CacheError, Stopped."""
        manifest = self._find(version)
        with self._lock:
            prefetch = self._prefetches.get(version)
        if prefetch is not None:
            prefetch.wait()
        return self._hold(manifest, pin)

    def adopt(self, manifest: Manifest, folder: Path, *, copy: bool = False) -> None:
        """Take the files of ``folder``, from which this process has just published ``manifest``, into the host's cache
        (or copies of them). What cannot be kept is fetched by whoever needs it."""
        try:
            self._cache(object_size(manifest)).adopt(self._store, manifest, folder, copy=copy)
        except (CacheError, OSError) as error:
            log.warning("%s was not kept for the engines of this host: %s", manifest.prefix, error)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder to export weights to; in the cache, if they fit there: then ``adopt`` need not copy them, nor
        need a store of plain files, which has the cache beside them, to publish them."""
        size = 2 * object_size(self._find(0))  # of which the first version may have half
        cache = self._cache(size)
        with cache.scratch() if cache.make_room(size) else temporary_folder("weights") as folder:
            yield folder

    def close(self) -> None:
        """End prefetches and give all leases back. What is asked for later is leased anew."""
        self._stop.closed.set("the engines of this process were closed")
        with self._lock:
            prefetches = list(self._prefetches.values())
        for prefetch in prefetches:
            prefetch.wait(CLOSE_S)
        with self._lock:
            leases = [*self._leases.values(), *self._pinned.values()]
            self._leases.clear()
            self._pinned.clear()
            self._begun.clear()
        for lease in leases:
            lease.release()
        for cache in self._caches.values():
            cache.leave()
        self._stop.closed = StopToken()

    def _prefetch(self, version: int, done: threading.Event) -> None:
        try:
            self._hold(self._find(version), pin=False)
        except Exception as error:  # whoever needs this version fetches it again, and gets what happens then
            log.info("version %d was not prefetched: %s", version, error)
        finally:
            with self._lock:
                del self._prefetches[version]
            done.set()

    def _hold(self, manifest: Manifest, pin: bool) -> Path:
        """Lease the folder of ``manifest``; those leased before the last ``LEASES`` go."""
        cache = self._cache(object_size(manifest))
        lease = cache.lease(self._store, manifest, fetchers=self._fetchers, stop=self._stop)
        with self._lock:
            leases: dict[Path, Lease] = self._pinned if pin else self._leases
            if (before := leases.pop(lease.folder, None)) is not None:
                before.release()
            leases[lease.folder] = lease
            while len(self._leases) > LEASES:
                self._leases.popitem(last=False)[1].release()
        return lease.folder

    def _cache(self, size: int) -> HostCache:
        root = cache_root(self._store, size)
        with self._lock:
            if root not in self._caches:
                self._caches[root] = HostCache(root)
            return self._caches[root]


class _Stops:
    """Set when the run stops, or when the prefetcher is closed."""

    def __init__(self, run: StopToken) -> None:
        self.run, self.closed = run, StopToken()

    def check(self) -> None:
        self.run.check()
        self.closed.check()

    def wait(self, timeout: float) -> bool:
        return self.run.wait(timeout) or self.closed.is_set()
