"""Which actor has which GPU of this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class GpuPool:
    """GPUs by id; ``visible`` lists those of this machine and is asked once, when the first is wanted."""

    def __init__(self, visible: Callable[[], Sequence[str]]) -> None:
        self._visible = visible
        self._all: list[str] | None = None
        self._taken: set[str] = set()
        self._lock = threading.Lock()

    def take(self, count: int) -> tuple[str, ...]:
        """``count`` free ids, in the machine's order. Raises RuntimeError when there are not as many."""
        with self._lock:
            if self._all is None:
                self._all = list(self._visible())
            free = [gpu for gpu in self._all if gpu not in self._taken]
            if count > len(free):
                raise RuntimeError(f"Not enough GPUs available: {count} wanted, {len(free)} free")
            self._taken.update(free[:count])
        return tuple(free[:count])

    def release(self, ids: Sequence[str]) -> None:
        with self._lock:
            self._taken.difference_update(ids)


def _visible() -> Sequence[str]:
    from forge_core.devices import visible_gpus  # it may import torch

    return visible_gpus()


THIS_MACHINE = GpuPool(_visible)
