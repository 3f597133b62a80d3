"""What a storage service must do for the store; ``local``, ``s3`` and ``memory`` implement it.

A path is a key that ``check_key`` accepted, below the root of the backend. Every backend guarantees:
- ``create``: of any number of concurrent writers of one path exactly one gets True, and readers see its whole body or
  nothing. ``nonce`` is unique to the call: a writer whose reply was lost still learns that it won.
- ``write``: replaces whole or not at all; for names that hold the digest of their content, and for advice.
- ``read``, ``read_range`` and ``download`` raise ``NotFound``; a range ends where the object ends at the latest.
  ``delete`` of a missing path does nothing; ``list`` gives the paths below a folder ("" is the root) with their sizes
  in bytes, ``folders`` the names of the folders directly below it (one that was just emptied may be among them);
  neither is cached.
- ``now`` and ``written_at`` (raises ``NotFound``) are seconds on one clock, the service's, whichever machine asks.
- ``unfinished`` is what writers began and did not finish, killed ones among them: no object, but it takes space.
- Failures of the service are ``StoreError``s that name the path and the remedy; passing ones are tried again first.
- Everything may be called from many threads at once.
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forge_core.store.errors import StoreError

PUT_NEW_LIMIT = 8 * 1024 * 1024  # bytes; from there on S3 clients upload in parts, which no server creates atomically


@dataclass(frozen=True)
class Unfinished:
    """The beginning of an object at ``path``, known to the backend as ``handle``: ``size`` bytes so far, started at
    ``since`` (seconds on the clock of the service)."""

    path: str
    handle: str
    size: int
    since: float


class Backend(Protocol):
    """``longest_poll_s`` is the longest pause, in seconds, of a sensor that waits for an object. ``folder`` is that of
    the root where objects are plain files, else None."""

    uri: str
    longest_poll_s: float
    folder: Path | None

    def create(self, path: str, body: bytes, nonce: str) -> bool: ...
    def write(self, path: str, data: bytes | Path, *, given: bool = False) -> None: ...
    def read(self, path: str) -> bytes: ...
    def read_range(self, path: str, start: int, end: int) -> bytes: ...
    def download(self, path: str, target: Path) -> None: ...
    def exists(self, path: str) -> bool: ...
    def list(self, folder: str) -> dict[str, int]: ...
    def total(self) -> int: ...
    def folders(self, folder: str) -> builtins.list[str]: ...
    def delete(self, path: str) -> None: ...
    def now(self) -> float: ...
    def written_at(self, path: str) -> float: ...
    def unfinished(self) -> builtins.list[Unfinished]: ...
    def discard(self, unfinished: Unfinished) -> None: ...


def check_key(key: str) -> str:
    """Return ``key`` when it names something below the store root; StoreError otherwise."""
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or key[0] in ".~" or "\\" in key or not key.isprintable():
        raise StoreError(
            f"{key!r} is not a key: write it relative to the store root, as names joined by '/', without empty parts, "
            "'..', backslashes, control characters or a dot at its beginning"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return ``prefix`` with exactly one '/' at its end; StoreError when it leaves the store root."""
    return check_key(prefix.removesuffix("/")) + "/"


def check_body(key: str, body: bytes) -> bytes:
    """Return ``body`` when every backend can create it atomically; StoreError otherwise."""
    if not 0 < len(body) < PUT_NEW_LIMIT:
        raise StoreError(
            f"{key}: put_new takes 1 to {PUT_NEW_LIMIT - 1} bytes, got {len(body)}: publish larger data as files"
        )
    return body
