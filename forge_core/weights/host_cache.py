"""Published objects, such as weights, in folders that all processes of this host share: in shared memory where that is
large enough.

Invariants:
- An object (store, prefix and content digest) has one folder. It appears by a rename, complete, and is never written
  again. Nobody leases it before its digests have been checked: while it was fetched, or, of what this host published
  itself, by the first who leases it.
- It is fetched once: whoever fetches holds the object's fetch lock, others wait for the lock and find the folder. The
  kernel releases the locks of a process that dies, so a waiting process takes over.
- Users hold a lease (a shared lock that ends with them, however they end). Only a folder that nobody leases is
  removed: all but the ``KEEP`` used last, and more of them when space is needed.
- The root belongs to this user alone: nobody else can put weights into it.

Files of an object ``x`` below the root: ``x/``, ``x.partial/`` while it is being made, ``x.unchecked`` until its
digests have been checked, ``x.fetch`` and ``x.lease``.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from forge_core.observability.memory import machine_memory
from forge_core.store.digests import SHORT, digest
from forge_core.store.errors import CorruptObject
from forge_core.store.manifest import Manifest, check_data
from forge_core.store.store import Stop, Store
from forge_core.weights.fetch import fetch
from forge_core.weights.locks import exclusive, exclusive_if_free, is_held, shared

VARIABLE = "FORGE_WEIGHTS_CACHE"
SHARED_MEMORY = Path("/dev/shm")
KEEP = 2  # folders that nobody leases
VERSIONS = 4  # that a file system must be able to hold to be worth using
FETCHERS = 8  # where no configuration says how many
MARGIN = 1.1  # of the bytes that are about to be written
log = logging.getLogger("forge")
_leases: weakref.WeakSet[Lease] = weakref.WeakSet()  # of this process
_kept: dict[tuple[str, str, Path], Lease] = {}  # that this process never gives back, by store and prefix
_caches: dict[Path, HostCache] = {}  # that this process has used


class CacheError(RuntimeError):
    """The cache cannot be used, or the weights do not fit beside those in use."""


class Lease:
    """A complete folder, which stays until ``release``, until nobody holds the lease, or until this process ends."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self._lock = lock
        _leases.add(self)

    def release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    __del__ = release


def cache_root(store: Store, size: int) -> Path:
    """Where objects of ``size`` bytes of ``store`` are cached: the same answer in all processes of this host.

    ``FORGE_WEIGHTS_CACHE``; else beside the files of a store of plain files, so that they can be linked; else shared
    memory; else, where that is missing or too small, the folder for temporary files.
    """
    named, mine = os.environ.get(VARIABLE), f"forge-weights-{os.getuid()}"
    if named:
        return Path(named).expanduser().absolute() / mine
    if store.folder is not None:
        return store.folder / ".cache" / mine
    if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) and shutil.disk_usage(SHARED_MEMORY).total >= VERSIONS * size:
        return SHARED_MEMORY / mine
    return Path(tempfile.gettempdir()) / mine


def object_size(manifest: Manifest) -> int:
    """Bytes of all files."""
    return sum(file.size for file in manifest.files)


def lease_published(store: Store, prefix: str) -> Lease:
    """The folder of the object ``prefix`` on this host. Raises NotFound, and as ``HostCache.lease``."""
    manifest = store.open_published(prefix).manifest
    return HostCache(cache_root(store, object_size(manifest))).lease(store, manifest, fetchers=FETCHERS)


def keep_published(store: Store, prefix: str) -> Path:
    """``lease_published``, for the life of this process."""
    lease = lease_published(store, prefix)
    return _kept.setdefault((store.uri, prefix, lease.folder), lease).folder


def kept(store: Store, prefix: str) -> Path | None:
    """The folder that ``keep_published`` gave of an object, whether it is still in the store or not."""
    folders = [folder for uri, name, folder in list(_kept) if (uri, name) == (store.uri, prefix)]
    return folders[-1] if folders else None


class HostCache:
    """``root`` is made when it does not exist. Safe to use from many threads and processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        _make_private(root)
        _caches[root] = self

    def lease(self, store: Store, manifest: Manifest, *, fetchers: int, stop: Stop | None = None) -> Lease:
        """The folder of ``manifest``, fetched with ``fetchers`` parallel range reads unless it is there.

        Raises CacheError, Stopped, and what ``fetch`` raises; nothing is cached then.
        """
        item = self._item(store, check_data(manifest))
        with exclusive(item.fetch_lock, stop):
            if not (item.holds(manifest) and item.sound(store, manifest)):
                self._fill(item, store, manifest, lambda folder: fetch(store, manifest, folder, fetchers, stop))
            return item.lease()

    def adopt(self, store: Store, manifest: Manifest, folder: Path, *, copy: bool = False) -> None:
        """Cache an object that this process has just published from ``folder`` (whose files move here, or are copied),
        so that this host never fetches it. A folder that lacks files, as that of one of several hosts, is left alone.
        Raises CacheError."""
        item = self._item(store, manifest)
        with exclusive(item.fetch_lock):
            if item.holds(manifest) or not (store.folder or _has(folder, manifest)):
                return
            take = shutil.copyfile if copy else shutil.move
            own = lambda target: _take(manifest, folder, target, take)
            fill = store.described(manifest).link_to if store.folder else own
            self._fill(item, store, manifest, fill, unchecked=True)
            item.lease().release()  # so it counts as used now

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder on this file system, for files that ``adopt`` may take. It goes with its process."""
        item = _Item(self.root, f"scratch-{uuid.uuid4().hex}")
        with exclusive(item.fetch_lock):
            item.partial.mkdir()
            try:
                yield item.partial
            finally:
                item.remove()

    def evict(self, keep: int, *, needed: int = 0) -> None:
        """Remove what nobody leases: leftovers of processes that died, all but the ``keep`` folders used last, and
        further ones, the oldest first, while fewer than ``needed`` bytes are free."""
        idle = [item for item in self._items() if item.idle()]
        for older, item in enumerate(idle):
            if len(idle) - older > keep or not item.folder.exists() or self.free() < needed:
                item.remove_if_idle()

    def make_room(self, size: int) -> bool:
        """Whether ``size`` bytes can be written now, after removing what must go for them."""
        self.evict(KEEP, needed=int(size * MARGIN))
        return self.free() >= size * MARGIN

    def leave(self) -> None:
        """What a process does that needs the cache no longer: the last one that uses it empties it."""
        if self.root.is_dir() and all(item.idle() for item in self._items()):
            self.evict(0)

    def free(self) -> int:
        """Bytes that may be written: no more than is free, and in shared memory no more than the machine has left."""
        free = shutil.disk_usage(self.root).free
        return min(free, machine_memory()[1]) if SHARED_MEMORY in self.root.parents else free

    def _item(self, store: Store, manifest: Manifest) -> _Item:
        identity = digest([store.uri, manifest.prefix, manifest.content])
        name = PurePosixPath(manifest.prefix).name.replace(".", "_")
        return _Item(self.root, f"{name}-{identity[:SHORT]}")

    def _items(self) -> list[_Item]:
        """Every object of which there is something, those used last at the end."""
        found = (path.name for path in self.root.iterdir())
        names = {name.partition(".")[0] for name in found if not name.startswith(".")}  # NFS names deleted files so
        return sorted((_Item(self.root, name) for name in names), key=_Item.used_at)

    def _fill(
        self, item: _Item, store: Store, manifest: Manifest, fill: Callable[[Path], None], *, unchecked: bool = False
    ) -> None:
        """Make ``item``'s folder; the caller holds its fetch lock."""
        item.clear()
        if not self.make_room(0 if self._links(store) else object_size(manifest)):
            raise self._full(manifest)
        try:
            item.partial.mkdir()
            fill(item.partial)
            if unchecked:
                item.unchecked.touch()
            item.partial.rename(item.folder)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self._full(manifest) from error
            raise
        finally:
            shutil.rmtree(item.partial, ignore_errors=True)

    def _links(self, store: Store) -> bool:
        """Whether files of ``store`` can be hard links here."""
        return store.folder is not None and store.folder.stat().st_dev == self.root.stat().st_dev

    def _full(self, manifest: Manifest) -> CacheError:
        used = sum(1 for item in self._items() if item.folder.exists())
        return CacheError(
            f"{manifest.prefix} ({object_size(manifest) / 1e9:.3g} GB) does not fit into the cache of weights "
            f"{self.root}: {self.free() / 1e9:.3g} GB are free beside the {used} versions in use. Free some memory or "
            f"space, or set {VARIABLE} to a folder on a larger file system"
        )


class _Item:
    """The files of one object below ``root``. ``sound``, ``clear``, ``remove`` and ``lease`` need its fetch lock."""

    def __init__(self, root: Path, name: str) -> None:
        self.folder, self.partial = root / name, root / f"{name}.partial"
        self.fetch_lock, self.lease_lock = root / f"{name}.fetch", root / f"{name}.lease"
        self.unchecked = root / f"{name}.unchecked"

    def holds(self, manifest: Manifest) -> bool:
        """Whether the folder is there, and nobody (such as a cleaner of temporary files) took anything away."""
        return _has(self.folder, manifest)

    def sound(self, store: Store, manifest: Manifest) -> bool:
        """Whether the folder has what was published; its digests are checked once."""
        if self.unchecked.exists():
            try:
                store.described(manifest).check(self.folder)
            except CorruptObject as error:
                log.warning("the copy of this host is fetched again: %s", error)
                return False
            self.unchecked.unlink()
        return True

    def lease(self) -> Lease:
        lock = shared(self.lease_lock)
        now = time.time_ns()  # the file system's own clock is coarser
        os.utime(self.lease_lock, ns=(now, now))
        return Lease(self.folder, lock)

    def idle(self) -> bool:
        return not is_held(self.fetch_lock) and not is_held(self.lease_lock)

    def used_at(self) -> float:
        """When it was leased last; 0 for what never was."""
        try:
            return self.lease_lock.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def clear(self) -> None:
        for path in (self.folder, self.partial):
            shutil.rmtree(path, ignore_errors=True)
        self.unchecked.unlink(missing_ok=True)

    def remove(self) -> None:
        self.clear()
        self.lease_lock.unlink(missing_ok=True)
        self.fetch_lock.unlink(missing_ok=True)

    def remove_if_idle(self) -> None:
        with exclusive_if_free(self.fetch_lock) as mine:
            if mine and not is_held(self.lease_lock):
                self.remove()


@atexit.register
def _leave_all() -> None:
    for lease in list(_leases):
        lease.release()
    for cache in list(_caches.values()):
        cache.leave()


def _has(folder: Path, manifest: Manifest) -> bool:
    files = ((folder / file.name, file.size) for file in manifest.files)
    return all(path.is_file() and path.stat().st_size == size for path, size in files)


def _take(manifest: Manifest, source: Path, target: Path, take: Callable[[Path, Path], object]) -> None:
    for file in manifest.files:
        (target / file.name).parent.mkdir(parents=True, exist_ok=True)
        take(source / file.name, target / file.name)
        (target / file.name).chmod(0o444)


def _make_private(root: Path) -> None:
    """Make ``root`` for this user alone. Raises CacheError when it cannot be made, or is somebody else's."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CacheError(
            f"the cache of weights cannot be made ({error}): set {VARIABLE} to a folder of yours"
        ) from error
    if root.is_symlink() or root.stat().st_uid != os.getuid():
        raise CacheError(f"{root} belongs to another user: remove it, or set {VARIABLE} to a folder of yours")
