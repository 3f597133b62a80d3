"""Which actor has which GPU of this machine.

An actor's GPUs are leased for as long as it has them: neither a run nor an actor of another process of Forge is given
them meanwhile, and no actor is given theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_core.gpu_leases import Lease


class GpuPool:
    """GPUs by id; ``visible`` lists those of this machine and is asked once, when the first is wanted."""

    def __init__(self, visible: Callable[[], Sequence[str]]) -> None:
        self._visible = visible
        self._all: list[str] | None = None
        self._leases: dict[tuple[str, ...], Lease] = {}
        self._lock = threading.Lock()

    def take(self, count: int) -> tuple[str, ...]:
        """``count`` free ids, in the machine's order, until ``release`` of the same ids. Raises RuntimeError when there
        are not as many."""
        from forge_core.gpu_leases import lease_free

        with self._lock:
            if self._all is None:
                self._all = list(self._visible())
            mine = {gpu for ids in self._leases for gpu in ids}
            ids, lease = lease_free([gpu for gpu in self._all if gpu not in mine], count)
            if count > len(ids):
                lease.close()
                raise RuntimeError(self._refusal(count, len(ids), len(mine)))
            self._leases[ids] = lease
        return ids

    def release(self, ids: Sequence[str]) -> None:
        with self._lock:
            if lease := self._leases.pop(tuple(ids), None):
                lease.close()

    def _refusal(self, count: int, free: int, mine: int) -> str:
        others = len(self._all or ()) - mine - free
        text = f"Not enough GPUs available: {count} wanted, {free} free"
        return f"{text} ({others} in use by other processes of Forge on this machine)" if others else text


def _visible() -> Sequence[str]:
    from forge_core.devices import visible_gpus  # it may import torch

    return visible_gpus()


THIS_MACHINE = GpuPool(_visible)
