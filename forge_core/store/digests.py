"""Digests: the sha256, in hexadecimal, of bytes, files and JSON values.

``digest`` is a function of the value alone: keys are sorted, nothing depends on the machine or the time, and a value
that JSON cannot hold (NaN, bytes, sets) is a ``TypeError`` or ``ValueError`` instead of an unstable digest.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

SHORT = 12  # hexadecimal digits of a digest that a file name carries
PIECE_BYTES = 16 << 20  # of a file, read and hashed at once: other threads of Python may delay each piece by 10 ms


def canonical_json(value: Any) -> bytes:
    """The one JSON text of ``value``: sorted keys, no spaces, UTF-8."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def digest(value: Any) -> str:
    """sha256 of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def data_digest(data: bytes | Path) -> tuple[str, int]:
    """sha256 and size in bytes of ``data`` (a Path: of the file's content, read in pieces)."""
    if not isinstance(data, Path):
        return hashlib.sha256(data).hexdigest(), len(data)
    found = hashlib.sha256()
    with data.open("rb", buffering=0) as file:
        piece = memoryview(bytearray(max(1, min(PIECE_BYTES, os.fstat(file.fileno()).st_size))))
        while count := file.readinto(piece):
            found.update(piece[:count])
        return found.hexdigest(), file.tell()


def content_digest(file_digests: dict[str, str]) -> str:
    """Digest of an object made of named files: over (name, sha256 of the file) in name order."""
    return digest(sorted(file_digests.items()))
