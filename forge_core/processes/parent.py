"""For processes that other software starts: end with the process that started this one, whatever ends that."""

from __future__ import annotations

import multiprocessing
import os
import signal

from forge_core.processes.guard import PR_SET_PDEATHSIG, prctl


def die_with_parent() -> None:
    """From now on ``kill -9`` of the parent kills this process too (Linux; elsewhere only a parent that is gone already
    is noticed). For children of ``multiprocessing``; nothing happens in other processes."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if not parent.is_alive():
        os._exit(1)
