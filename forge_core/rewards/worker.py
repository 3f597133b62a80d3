"""A grading process: builds the rewards once, then grades one item at a time, and tells each grade as it has it.

Guarantees:
- It ends with its parent, also while a grade hangs (on Linux), and with its parent's end of the pipe elsewhere.
- What a reward prints goes to standard error, and nowhere once nobody reads that: no grade fails by it. A reward that
  reads standard input finds it empty.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import replace
from typing import Any

from forge_core.observability.metrics import Outbox
from forge_core.processes.output import outlive_readers
from forge_core.rewards import wire
from forge_core.rewards.grading import Spec, grade_item
from forge_core.rewards.resolve import RewardError, build


def main() -> None:
    """Serve the parent until it closes the pipe."""
    requests, replies = _take_pipes()
    outlive_readers()
    outbox = Outbox()
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has gone: nobody is left to tell
        specs: list[Spec]
        specs, parent = wire.receive(requests)
        _die_with(parent)
        try:
            functions = [build(spec) for spec in specs]
        except RewardError as error:
            wire.send(replies, str(error))
            return
        wire.send(replies, None)
        while True:
            first, item = wire.receive(requests)
            for function in functions[first:]:
                grading = grade_item(function, item)
                wire.send(replies, replace(grading, recorded=tuple(outbox.taken())))


def _take_pipes() -> tuple[int, int]:
    """Keep the two pipes for messages and give the rewards others in their place."""
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, replies


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    if sys.platform != "linux":
        return
    import ctypes

    libc: Any = ctypes.CDLL(None)
    pr_set_pdeathsig = 1
    libc.prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
