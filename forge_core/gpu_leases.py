"""Which GPUs of a machine other processes of Forge work on: a lock for each GPU, which the kernel frees when its holder
dies.

Invariants:
- GPUs that no other process has come first; where they do not suffice, the others are shared, and the lease says which.
- Of two that choose at the same time one waits for the other, so they do not choose the same free GPU.
- A lock is named after the GPU itself where the driver knows it, whatever the process's ``*_VISIBLE_DEVICES`` calls it.

Locks are in the temporary folder of this machine, a user's own: other users' processes, and those in containers, are
not seen. Where that folder cannot be used, nobody is.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from forge_core.config.errors import ConfigError
from forge_core.devices import Placement
from forge_core.nvidia_smi import uuids
from forge_core.weights.locks import exclusive, exclusive_if_free

log = logging.getLogger("forge")
Choose = Callable[[Sequence[str]], Placement]


class Lease:
    """Locks of the GPUs that a process uses, until ``close``. ``contested``: those that another process has too."""

    def __init__(self, held: ExitStack, contested: tuple[str, ...]) -> None:
        self._held, self.contested = held, contested

    @property
    def warning(self) -> str | None:
        """What a person should know of it."""
        if not self.contested:
            return None
        return (
            f"GPU {', '.join(self.contested)} is in use by another process of Forge too, for want of a free one: both "
            "need memory there (generator.engine_args.gpu_memory_utilization), and both are slower"
        )

    def close(self) -> None:
        self._held.close()


def lease(gpus: Sequence[str], choose: Choose) -> tuple[Placement, Lease]:
    """What ``choose`` makes of those of ``gpus`` that no other process has, or of all of them, free ones first, where
    these are too few (or none). Raises ConfigError as ``choose``."""
    if not gpus:
        return choose(gpus), Lease(ExitStack(), ())
    with ExitStack() as looked:
        try:
            free = _free(gpus, looked)
        except OSError as error:
            log.debug("GPUs are chosen without a look at who has them: %s", error)
            return choose(gpus), Lease(ExitStack(), ())
        placement = _chosen(choose, [*free], [*free, *(gpu for gpu in gpus if gpu not in free)])
        chosen, held = used(placement), ExitStack()
        for gpu in free.keys() & chosen:
            held.push(free[gpu].pop_all())
        return placement, Lease(held, tuple(gpu for gpu in gpus if gpu in chosen and gpu not in free))


def _free(gpus: Sequence[str], looked: ExitStack) -> dict[str, ExitStack]:
    """The GPUs that nobody has, each with its lock, which ends with ``looked`` unless it is taken out of its stack."""
    folder, names = Path(tempfile.gettempdir()) / f"forge-gpus-{os.getuid()}", {gpu: _name(gpu) for gpu in gpus}
    folder.mkdir(mode=0o700, exist_ok=True)
    looked.enter_context(exclusive(folder / "choosing"))
    locks = {gpu: looked.enter_context(ExitStack()) for gpu in gpus}
    return {gpu: lock for gpu, lock in locks.items() if lock.enter_context(exclusive_if_free(folder / names[gpu]))}


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
