"""Deleting many objects, so that what is half deleted is no object."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from forge_core.store.manifest import MANIFEST
from forge_core.store.store import Store

AT_ONCE = 16


@dataclass(frozen=True)
class Garbage:
    """``keys`` (with sizes in bytes) that go together: those of the prefix, or of the kind, ``name``."""

    name: str
    keys: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.keys.values())


def delete_objects(store: Store, keys: Iterable[str]) -> None:
    """Delete ``keys``: all manifests first, then the rest, side by side."""
    keys = list(keys)
    manifests = [key for key in keys if key.endswith(f"/{MANIFEST}")]
    others = [key for key in keys if not key.endswith(f"/{MANIFEST}")]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for part in (manifests, others):
            list(pool.map(store.delete, part))
