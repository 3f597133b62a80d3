"""Which GPUs of a machine other processes of Forge work on: a lock for each GPU, which the kernel frees when its holder
dies.

Invariants:
- GPUs that no other process has come first; where they do not suffice, the others are shared, and the lease says which.
- Of two that choose at the same time one waits for the other, so they do not choose the same free GPU.
- A lock is named after the GPU itself where the driver knows it, whatever the process's ``*_VISIBLE_DEVICES`` calls it.

Locks are files in the machine's shared memory, which no job has for itself and nobody tidies, as temporary folders; the
folder is a user's own: other users' processes, and those in containers, are not seen. Where it cannot be used, or a
process that is stopped while it chooses bars it, nobody is, and the log says so.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from forge_core.config.errors import ConfigError
from forge_core.devices import Placement
from forge_core.nvidia_smi import uuid_of
from forge_core.weights.host_cache import SHARED_MEMORY
from forge_core.weights.locks import POLL_S, exclusive_if_free

log = logging.getLogger("forge")
CHOOSING_S = 10.0
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
            f"another process of Forge has GPU {', '.join(self.contested)} too, for want of a free one: both need "
            "memory there, and both are slower: wait for its end, or choose others with CUDA_VISIBLE_DEVICES (ROCm: "
            "HIP_VISIBLE_DEVICES); vLLM's share of the memory is generator.engine_args.gpu_memory_utilization"
        )

    def close(self) -> None:
        self._held.close()


def lease(gpus: Sequence[str], choose: Choose) -> tuple[Placement, Lease]:
    """What ``choose`` makes of those of ``gpus`` that no other process has, or of all of them, free ones first, where
    these are too few (or none). Raises ConfigError as ``choose``."""
    with _free(gpus) as free:
        placement = _chosen(choose, [*free], [*free, *(gpu for gpu in gpus if gpu not in free)])
        chosen = used(placement)
        contested = tuple(gpu for gpu in gpus if gpu in chosen and gpu not in free)
        return placement, Lease(_kept(free, chosen), contested)


def lease_free(gpus: Sequence[str], count: int) -> tuple[tuple[str, ...], Lease]:
    """The first ``count`` of ``gpus`` that nobody has, or all of these where they are fewer."""
    with _free(gpus) as free:
        chosen = tuple(free)[:count]
        return chosen, Lease(_kept(free, chosen), ())


def busy(gpus: Sequence[str]) -> tuple[str, ...]:
    """Those of ``gpus`` that a process of Forge, this one included, has at this moment."""
    with _free(gpus) as free:
        return tuple(gpu for gpu in gpus if gpu not in free)


@contextmanager
def _free(gpus: Sequence[str]) -> Iterator[dict[str, ExitStack]]:
    """The GPUs that nobody has, each with its lock, which ends with the context unless it is taken out of its stack."""
    with ExitStack() as looked:
        try:
            free = _locked(gpus, looked) if gpus else {}
        except OSError as error:
            log.warning("GPUs are chosen without a look at which of them other processes have: %s", error)
            free = {gpu: ExitStack() for gpu in gpus}
        yield free


def _locked(gpus: Sequence[str], looked: ExitStack) -> dict[str, ExitStack]:
    home = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    folder, names = home / f"forge-gpus-{os.getuid()}", {gpu: _name(gpu) for gpu in gpus}
    folder.mkdir(mode=0o700, exist_ok=True)
    _wait_for(folder / "choosing", looked)
    locks = {gpu: looked.enter_context(ExitStack()) for gpu in gpus}
    return {gpu: lock for gpu, lock in locks.items() if lock.enter_context(exclusive_if_free(folder / names[gpu]))}


def _wait_for(path: Path, looked: ExitStack) -> None:
    """Hold ``path`` until ``looked`` ends. Raises TimeoutError when its holder, which needs no second, keeps it."""
    deadline = time.monotonic() + CHOOSING_S
    while not looked.enter_context(exclusive_if_free(path)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"another process, which may be stopped, has {path} for more than {CHOOSING_S:g} s")
        time.sleep(POLL_S)


def _kept(free: Mapping[str, ExitStack], chosen: Collection[str]) -> ExitStack:
    held = ExitStack()
    for gpu in free.keys() & set(chosen):
        held.push(free[gpu].pop_all())
    return held


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
    known = uuid_of(int(gpu)) if gpu.isdecimal() else None
    return known or gpu.replace("/", "_")
