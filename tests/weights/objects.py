"""What a trainer publishes, small, and waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

from forge_core.store import Manifest, Store


def published(store: Store, version: int = 1, size: int = 1000) -> Manifest:
    """An object as a trainer publishes it: two large files and a small one."""
    body = str(version).encode() * size
    files = {"model-1.safetensors": body, "model-2.safetensors": body[::-1] + b"!", "config.json": b"{}"}
    return store.publish(f"weights/{version:08d}-a", files, request="r")


def delete(store: Store, manifest: Manifest) -> None:
    for file in manifest.files:
        store.delete(file.key)


def until(holds: Callable[[], object]) -> None:
    """Return when ``holds()``; fail after 20 s."""
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
