"""The path under which an engine loads its model: the same for every engine of one architecture, version after version.

vLLM keeps what it compiles (half a minute of an engine's start on a GPU) under a hash that the model's path goes into.
The folder of a version has another path in every version, run and store, so no start would find what one before it
left. Hence a link, beside vLLM's own cache.

Invariants:
- A path is one engine's alone while that engine loads: two that load at the same time have two, so neither can be given
  the other's model. The lock is the kernel's, so ``kill -9`` frees it.
- The link is made by whoever has the lock, and gone when the lock is.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from forge_core.weights.locks import exclusive_if_free

log = logging.getLogger("forge")


@contextmanager
def lasting_path(folder: Path) -> Iterator[Path]:
    """A path of the model ``folder`` that another model of the same ``config.json`` had before, where there was one;
    ``folder`` itself where nothing can be written beside vLLM's cache: vLLM can keep nothing there either."""
    architecture = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:16]
    with ExitStack() as stack:
        path = folder
        try:
            place = stack.enter_context(_own_place(_cache() / "forge-models" / architecture))
            path = stack.enter_context(_linked(place / "model", folder.absolute()))
        except (OSError, RuntimeError) as error:  # the latter of a user without a home
            log.debug("vLLM's cache cannot be written: %s", error)
        yield path


@contextmanager
def _linked(link: Path, folder: Path) -> Iterator[Path]:
    link.unlink(missing_ok=True)  # of one that was killed
    link.symlink_to(folder, target_is_directory=True)
    try:
        yield link
    finally:
        with suppress(OSError):  # the cache may have been removed meanwhile, and be another's by now
            if link.readlink() == folder:
                link.unlink()


@contextmanager
def _own_place(root: Path) -> Iterator[Path]:
    """The first folder of ``root`` that nobody uses, locked."""
    for number in itertools.count():
        place = root / str(number)
        place.mkdir(parents=True, exist_ok=True)
        with exclusive_if_free(place / "lock") as mine:
            if mine:
                yield place
                return


def _cache() -> Path:
    """Where vLLM has its cache."""
    own = os.environ.get("VLLM_CACHE_ROOT")
    found = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm"
    return found.expanduser().absolute()
