"""The part of ``forge doctor`` about a store: access, conditional writes, clock, latency, throughput, listing.

What is written lies below ``probe/`` and is deleted again. Of a store that cannot be used only that is said.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from flows.check import Check
from forge_core.store import File, Store, StoreError, open_store
from forge_core.store.deletion import delete_objects

MIB = 2**20
FIRST_MIB, LARGE_MIB = 4, 64  # the larger one where the first takes less than a second
FILES = 4
READERS = 8
REQUESTS = 10
CLOCK_S = 30.0


def store_checks(uri: str) -> list[Check]:
    """What there is to say about the store ``uri``."""
    try:
        store = open_store(uri)
        store.list("probe")
    except StoreError as error:
        return [Check("store", False, str(error), "choose another store with --store or FORGE_STORE", essential=True)]
    return [
        Check("store", True, f"{uri}: readable, writable, refuses to overwrite", essential=True),
        *(check for look in (_clock, _latency, _listing, _throughput, _unfinished) for check in _checked(look, store)),
    ]


def _checked(look: Callable[[Store], Check], store: Store) -> Iterator[Check]:
    try:
        yield look(store)
    except StoreError as error:
        yield Check(f"store: {look.__name__.removeprefix('_')}", False, str(error), "see docs/object-storage.md")


def _clock(store: Store) -> Check:
    before = time.time()
    there = store.now()
    here = (before + time.time()) / 2
    difference = there - here
    if abs(difference) <= CLOCK_S:
        return Check("store: clock", True, f"within {max(1.0, abs(difference)):.0f} s of this machine's")
    detail = f"{abs(difference):.0f} s {'ahead of' if difference > 0 else 'behind'} this machine's"
    return Check("store: clock", False, detail, "set the clock (NTP): S3 refuses requests that are 15 minutes off")


def _latency(store: Store) -> Check:
    key = f"probe/{uuid.uuid4().hex}"
    store.put_new(key, b"x")
    try:
        seconds = {"read": _median(lambda: store.read(key)), "look-up": _median(lambda: store.exists(key))}
    finally:
        store.delete(key)
    small = ", ".join(f"{name} {1000 * s:.1f} ms" for name, s in seconds.items())
    return Check("store: latency", True, f"{small} (small object, median of {REQUESTS})")


def _listing(store: Store) -> Check:
    started = time.monotonic()
    keys = len(store.list(""))
    return Check("store: listing", True, f"{keys} objects in {time.monotonic() - started:.2f} s")


def _throughput(store: Store) -> Check:
    up, down = _moved(store, FIRST_MIB)
    if up < 1.0 and down < 1.0:
        up, down = _moved(store, LARGE_MIB)
        size = LARGE_MIB
    else:
        size = FIRST_MIB
    return Check("store: throughput", True, f"{size / up:.0f} MiB/s up, {size / down:.0f} MiB/s down ({size} MiB)")


def _moved(store: Store, mebibytes: int) -> tuple[float, float]:
    """Seconds that it takes to write, and to read, so much in ``FILES`` files."""
    prefix = f"probe/{uuid.uuid4().hex}/"
    bodies = {f"{n}.bin": os.urandom(mebibytes * MIB // FILES) for n in range(FILES)}
    try:
        started = time.monotonic()
        files = store.upload(prefix, bodies)
        written = time.monotonic()
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(lambda part: store.read_range(*part), _parts(files)))
        return written - started, time.monotonic() - written
    finally:
        delete_objects(store, store.list(prefix))


def _parts(files: tuple[File, ...]) -> list[tuple[str, int, int]]:
    step = 4 * MIB
    return [(f.key, at, min(at + step, f.size)) for f in files for at in range(0, f.size, step)]


def _unfinished(store: Store) -> Check:
    uploads = store.unfinished()
    size = sum(upload.size for upload in uploads) / MIB
    return Check(
        "store: unfinished", True, f"{len(uploads)} writes begun, {size:.0f} MiB: forge gc ends interrupted ones"
    )


def _median(request: Callable[[], object]) -> float:
    def timed() -> float:
        started = time.monotonic()
        request()
        return time.monotonic() - started

    return median(timed() for _ in range(REQUESTS))
