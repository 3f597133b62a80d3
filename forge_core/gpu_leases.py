"""Which GPUs of a machine other processes of Forge work on: a lock for each GPU, which the kernel frees when its holder
dies.

Invariants:
- GPUs that no other process has come first; where they do not suffice, the others are shared, and the lease says which.
- Of two that choose at the same time one waits for the other, so they do not choose the same free GPU.
- A lock is named after the GPU itself where the driver knows it, whatever the process's ``*_VISIBLE_DEVICES`` calls it.

Locks are in the temporary folder of this machine, a user's own: other users' processes, and those in containers, are
not seen.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from forge_core.config.errors import ConfigError
from forge_core.devices import Placement
from forge_core.nvidia_smi import uuids
from forge_core.weights.locks import exclusive, exclusive_if_free

Choose = Callable[[Sequence[str]], Placement]


class Lease:
    """Locks of the GPUs that a process uses, until ``close``. ``contested``: GPUs of it that another process has."""

    def __init__(self, held: ExitStack, contested: tuple[str, ...]) -> None:
        self._held, self.contested = held, contested

    def close(self) -> None:
        self._held.close()


def lease(gpus: Sequence[str], choose: Choose) -> tuple[Placement, Lease]:
    """What ``choose`` makes of those of ``gpus`` that no other process has, or of all of them, free ones first, where
    these are too few (or none). Raises ConfigError as ``choose``."""
    if not gpus:
        return choose(gpus), Lease(ExitStack(), ())
    folder = Path(tempfile.gettempdir()) / f"forge-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with exclusive(folder / "choosing"), ExitStack() as looked:
        locks = {gpu: ExitStack() for gpu in gpus}
        free = [g for g in gpus if looked.enter_context(locks[g]).enter_context(exclusive_if_free(folder / _name(g)))]
        placement = _chosen(choose, free, [*free, *(gpu for gpu in gpus if gpu not in free)])
        held = ExitStack()
        for gpu in used(placement) & set(free):
            held.push(locks[gpu].pop_all())
        return placement, Lease(held, tuple(gpu for gpu in gpus if gpu in used(placement) and gpu not in free))


def used(placement: Placement) -> set[str]:
    """The GPUs of all roles."""
    return {*placement.trainer, *placement.reference, *(gpu for replica in placement.generator for gpu in replica)}


def _chosen(choose: Choose, free: Sequence[str], ordered: Sequence[str]) -> Placement:
    if free:
        try:
            return choose(free)
        except ConfigError:
            pass  # too few
    return choose(ordered)


def _name(gpu: str) -> str:
    known = uuids()
    return known[int(gpu)] if gpu.isdigit() and int(gpu) < len(known) else gpu.replace("/", "_")
