"""The object store: everything a run produces, as immutable objects, behind four verbs.

- ``put_new`` creates or fails: exactly one of any number of racing writers wins.
- ``publish`` writes files under names that hold their digest, then the manifest by ``put_new``: the first manifest
  wins, the loser adopts it, writers never touch each other's files. No manifest, no object.
- ``open_published`` reads through the manifest and checks digests: nothing torn or corrupted is ever returned.
- ``wait_for`` waits for a key with back-off, a deadline and a stop token.

``put_json`` overwrites, and is for advice only (heartbeats): no guarantee rests on it.

A store object may be used from any number of threads. Keys are relative to the root and cannot leave it. JSON bodies
carry the nonce of their writer, so no two are equal and none is empty; readers do not see it.
"""

from __future__ import annotations

import builtins
import json
import re
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from forge_core.overdue import Overdue
from forge_core.store.backend import Backend, Unfinished, check_body, check_key, check_prefix
from forge_core.store.digests import canonical_json, data_digest
from forge_core.store.errors import CorruptObject, IdentityError, NotFound, StoreError
from forge_core.store.local import LocalBackend
from forge_core.store.manifest import MANIFEST, File, Manifest, stored_name
from forge_core.store.published import Published

FIRST_POLL_S = 0.02
READERS = 32  # small objects that are read at a time: what they take is waiting
WRITERS = 8  # files of one object that are written at a time
_PROBED: set[str] = set()
_PROBE_LOCK = threading.Lock()
_SCHEME = re.compile(r"(s3|file|memory):(/?[^/].*)")  # which lacks a slash or two


class Stop(Protocol):
    """What the store needs of a stop token (``forge_core.stop.StopToken``)."""

    def check(self) -> None: ...
    def wait(self, timeout: float) -> bool: ...


def open_store(uri: str, *, probe: bool = True) -> Store:
    """The store at ``uri``: a folder, ``file:///folder``, ``s3://bucket/prefix`` or ``memory://name``.

    The first use of a root in a process writes an object twice, and refuses a store that lets the second one through;
    not without ``probe``, for who only reads or deletes: a full store takes no more objects.
    StoreError names the store and the remedy: wrong credentials, missing bucket, unwritable folder, unknown scheme.
    """
    store = Store(_backend(uri))
    with _PROBE_LOCK:
        if probe and store.uri not in _PROBED:
            store.probe()
            _PROBED.add(store.uri)
    return store


def _backend(uri: str) -> Backend:
    scheme, separator, rest = uri.partition("://")
    if not separator:
        if mistyped := _SCHEME.match(uri):  # a folder of that name would be the machine's, and lost with it
            scheme, rest = mistyped[1], mistyped[2].lstrip("/")
            meant = f"file:///{rest}" if scheme == "file" else f"{scheme}://{rest}"
            raise StoreError(
                f"store {uri!r}: a store's address has two slashes: write {meant}, or ./{uri} for a folder of that name"
            )
        return LocalBackend(Path(uri).expanduser())
    if scheme == "file":
        if not rest.startswith("/"):
            raise StoreError(f"store {uri!r}: write file:// and an absolute path, such as file:///data/forge")
        return LocalBackend(Path(rest))
    bucket, _, prefix = rest.strip("/").partition("/")
    if scheme not in ("s3", "memory") or not bucket:
        raise StoreError(f"store {uri!r}: use a folder, file:///folder, s3://bucket/prefix or memory://name")
    if prefix:
        check_key(prefix)
    if scheme == "s3":
        from forge_core.store.s3 import S3Backend

        return S3Backend(bucket, prefix)
    from forge_core.store.memory import MemoryBackend

    return MemoryBackend(rest.strip("/"))


class Store:
    """See the module. ``uri`` is the root, in full."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.uri = backend.uri

    @property
    def folder(self) -> Path | None:
        """The root of a store of plain files; None where objects are no files of this host."""
        return self._backend.folder

    @property
    def longest_poll_s(self) -> float:
        """Seconds between two looks of somebody who waits for an object: what a look costs decides."""
        return self._backend.longest_poll_s

    def put_new(self, key: str, data: bytes) -> bool:
        """Create ``key`` with ``data`` (1 byte to under 8 MiB). True: this call created it. False: it was there."""
        return self._backend.create(check_key(key), check_body(key, data), uuid.uuid4().hex)

    def put_new_json(self, key: str, value: Mapping[str, Any]) -> bool:
        """``put_new`` of a JSON object. ``nonce`` is a reserved key. Raises StoreError when JSON cannot hold it."""
        nonce = uuid.uuid4().hex
        return self._backend.create(check_key(key), _json_body(key, value, nonce), nonce)

    def put_json(self, key: str, value: Mapping[str, Any]) -> None:
        """Store a JSON object under ``key`` in place of what is there: the last of several writers wins.

        For advice only, such as heartbeats: nothing that a guarantee rests on is ever written this way. Readers see
        one whole value or another. Raises as ``put_new_json``.
        """
        self._backend.write(check_key(key), _json_body(key, value, uuid.uuid4().hex))

    def read(self, key: str) -> bytes:
        """The bytes of ``key``. Raises NotFound."""
        return self._backend.read(check_key(key))

    def read_json(self, key: str) -> dict[str, Any]:
        """What ``put_new_json`` wrote. Raises NotFound, and CorruptObject when it is not a JSON object."""
        try:
            value = json.loads(self.read(key))
        except ValueError as error:
            raise CorruptObject(f"{key} in the store {self.uri} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise CorruptObject(f"{key} in the store {self.uri} is not a JSON object")
        value.pop("nonce", None)
        return value

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Bytes ``start`` (0 or more) to ``end`` (exclusive, after ``start``) of ``key``: fewer where it ends before.
        Raises NotFound."""
        return self._backend.read_range(check_key(key), start, end)

    def exists(self, key: str) -> bool:
        """Whether ``key`` exists now (never answered from a cache)."""
        return self._backend.exists(check_key(key))

    def list(self, prefix: str) -> builtins.list[str]:
        """All keys below the folder ``prefix`` ("" is the root), sorted. For people and collectors: versions are found
        through the ledger, never by listing."""
        return [*self.sizes(prefix)]

    def sizes(self, prefix: str) -> dict[str, int]:
        """What ``list`` lists, with sizes in bytes."""
        return self._backend.list(check_prefix(prefix).rstrip("/") if prefix else "")

    def total(self) -> int:
        """Bytes of all objects, counted without holding their names."""
        return self._backend.total()

    def folders(self, prefix: str) -> builtins.list[str]:
        """The names of the folders directly below the folder ``prefix`` ("" is the root), sorted. Some servers still
        name a folder that was just emptied."""
        return self._backend.folders(check_prefix(prefix).rstrip("/") if prefix else "")

    def now(self) -> float:
        """Seconds since 1970 on the store's own clock (the server's, or the file system's), whichever machine asks."""
        return self._backend.now()

    def written_at(self, key: str) -> float:
        """When ``key`` was written, on that clock. Raises NotFound."""
        return self._backend.written_at(check_key(key))

    def unfinished(self) -> builtins.list[Unfinished]:
        """What writers, killed ones among them, began and did not finish."""
        return self._backend.unfinished()

    def discard(self, unfinished: Unfinished) -> None:
        """Delete what ``unfinished`` told of. Whoever still writes it fails, and begins anew."""
        self._backend.discard(unfinished)

    def delete(self, key: str) -> None:
        """Delete ``key``; nothing happens when it does not exist."""
        self._backend.delete(check_key(key))

    def publish(
        self,
        prefix: str,
        files: Mapping[str, bytes | Path],
        *,
        request: str,
        provenance: Mapping[str, Any] | None = None,
    ) -> Manifest:
        """Publish ``files`` (plain name -> content) as the object ``prefix``.

        Returns the manifest that holds: this call's, or that of the writer that was first, whose files may differ.
        Raises IdentityError when the first writer's ``request`` was another one.
        """
        prefix = check_prefix(prefix)
        if self.published(prefix):
            return self._manifest(prefix, request)
        return self.publish_uploaded(prefix, self.upload(prefix, files), request=request, provenance=provenance)

    def upload(self, prefix: str, files: Mapping[str, bytes | Path], *, given: bool = False) -> tuple[File, ...]:
        """The first half of ``publish``: write the files. Several processes may each write a share of one object.
        ``given``: nobody changes these files any more, so a store on their file system need not copy them."""
        prefix = check_prefix(prefix)
        for name in files:
            check_key(prefix + name)
        # Large files are hashed and written side by side.
        write = lambda item: self._write_file(prefix, item[0], item[1], given)
        with ThreadPoolExecutor(max(1, min(WRITERS, len(files)))) as pool:
            return tuple(pool.map(write, sorted(files.items())))

    def publish_uploaded(
        self, prefix: str, files: Iterable[File], *, request: str, provenance: Mapping[str, Any] | None = None
    ) -> Manifest:
        """The second half of ``publish``: make an object of what ``upload`` wrote under ``prefix``, by all shares.

        Returns and raises as ``publish`` does; StoreError when two shares hold different files of one name.
        """
        prefix = check_prefix(prefix)
        manifest = Manifest.of(prefix, request, files, provenance or {})
        if self.put_new_json(prefix + MANIFEST, manifest.to_json()):
            return manifest
        return self._manifest(prefix, request)

    def open_published(self, prefix: str, *, request: str | None = None) -> Published:
        """The object ``prefix``. Raises NotFound when nothing is published there, IdentityError when it was made for
        another ``request``, CorruptObject when its manifest is unreadable."""
        return Published(self._backend, self._manifest(check_prefix(prefix), request))

    def described(self, manifest: Manifest, *, request: str | None = None) -> Published:
        """The object whose ``manifest`` the caller has read before. Raises IdentityError as ``open_published`` does."""
        return Published(self._backend, self._required(manifest, request))

    def published(self, prefix: str) -> bool:
        """Whether the object ``prefix`` is complete."""
        return self.exists(check_prefix(prefix) + MANIFEST)

    def wait_for(self, key: str, *, timeout_s: float, stop: Stop | None = None) -> None:
        """Return when ``key`` exists. Raises Overdue after ``timeout_s`` seconds, Stopped when ``stop`` is set."""
        deadline, pause = time.monotonic() + timeout_s, FIRST_POLL_S
        while not self.exists(key):
            left = deadline - time.monotonic()
            if left <= 0:
                raise Overdue(f"{key} did not appear in the store {self.uri} within {timeout_s:g} s")
            _sleep(min(pause, left), stop)
            pause = min(pause * 1.5, self._backend.longest_poll_s)

    def probe(self) -> None:
        """Raise StoreError unless the store can be read and written, and refuses to create what exists."""
        key = f"probe/{uuid.uuid4().hex}"
        with suppress(NotFound):
            self.read(key)  # unlike a HEAD, a read tells a missing bucket from a missing object
        if not self.put_new(key, b"first"):
            raise StoreError(f"the store {self.uri} says that {key} exists, which nobody wrote: check its server")
        second = self.put_new(key, b"second")
        self.delete(key)
        if second:
            raise StoreError(
                f"the store {self.uri} overwrote an object that it was asked to create: its server ignores "
                "If-None-Match: use one that enforces conditional PUT"
            )

    def _write_file(self, prefix: str, name: str, data: bytes | Path, given: bool) -> File:
        sha256, size = data_digest(data)
        key = prefix + stored_name(name, sha256)
        self._backend.write(key, data, given=given)
        return File(name, key, size, sha256)

    def _manifest(self, prefix: str, request: str | None) -> Manifest:
        key = prefix + MANIFEST
        try:
            value = self.read_json(key)
        except NotFound as error:
            raise NotFound(self.uri, key, "nothing is published under this prefix") from error
        try:
            manifest = Manifest.from_json(value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptObject(f"{key} in the store {self.uri} is not a manifest: {error!r}") from error
        return self._required(manifest, request)

    def _required(self, manifest: Manifest, request: str | None) -> Manifest:
        if request is not None and manifest.request != request:
            raise IdentityError(
                f"{manifest.prefix} in the store {self.uri} was made for another request ({manifest.request}, not "
                f"{request}): its inputs or settings differ; use another run.id, or the inputs and settings that it "
                "was made with"
            )
        return manifest


def _json_body(key: str, value: Mapping[str, Any], nonce: str) -> bytes:
    if "nonce" in value:
        raise StoreError(f"{key}: the key 'nonce' is the store's own: use another name")
    try:
        return check_body(key, canonical_json({**value, "nonce": nonce}))
    except (TypeError, ValueError) as error:
        raise StoreError(f"{key}: not a JSON value: {error}") from error


def _sleep(seconds: float, stop: Stop | None) -> None:
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        stop.check()
