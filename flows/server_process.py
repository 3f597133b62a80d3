"""The Prefect server as one process: ``python -P server_process.py SOCKET_FD PARENT_PID``.

Started by ``flows/server.py`` with the listening socket and the whole configuration (``PREFECT_*`` variables) already
in place. uvicorn runs Prefect's application in this very process, so there is no grandchild that could outlive it.

Guarantees: on SIGTERM it ends within END_S seconds, whatever its requests wait for. With PARENT_PID other than 0 this
process ends with its parent, however the parent ends (``kill -9`` included). On Linux the kernel kills it at once;
elsewhere it looks every half second whether it was orphaned.

On SQLite Prefect 3.7 waits, in the thread of its event loop, for a coroutine that takes a lock, whenever an automation
is written. When a task of that loop holds the lock the server never answers again; ``later`` lets nobody wait.
At every poll of a worker it also runs two tasks side by side that read before they write, of which SQLite refuses the
slower one: its traceback fills the log. ``begin`` makes such tasks writers from their beginning, which wait.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

PR_SET_PDEATHSIG = 1
END_S = 10.0
Begin = Callable[..., AbstractAsyncContextManager[Any]]
_going_on: set[asyncio.Task[Any]] = set()  # an event loop keeps no task alive


def die_with_parent(parent: int) -> None:
    """Tie this process to ``parent``; ends at once if ``parent`` is gone already."""
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)
    if sys.platform != "linux":
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _end_in_time(server: Any) -> None:
    """Ask no longer than END_S seconds: what waits for a locked database would keep the server alive for minutes."""
    while not server.should_exit:
        time.sleep(0.2)
    time.sleep(END_S)
    os._exit(128 + signal.SIGTERM)


def later(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Have the running event loop do it, without waiting for it."""
    task = asyncio.get_running_loop().create_task(coroutine)
    _going_on.add(task)
    task.add_done_callback(_going_on.discard)


def begin(original: Begin) -> Begin:
    """``AioSqliteConfiguration.begin_transaction``, with BEGIN IMMEDIATE for tasks that mark what a poll has seen."""
    from docket.dependencies import current_execution

    def begin_transaction(self: Any, session: Any, with_for_update: bool = False) -> AbstractAsyncContextManager[Any]:
        task = current_execution.get(None)
        marks = task is not None and task.function_name.startswith("mark_")
        return original(self, session, with_for_update or marks)

    return begin_transaction


def main(socket_fd: int, parent: int) -> int:
    if parent:
        die_with_parent(parent)
    gc.set_threshold(10_000, 10, 10)  # as forge_core/collector.py does; this file needs nothing but Prefect
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.server.database.configurations import AioSqliteConfiguration
    from prefect.server.events.models import automations

    automations.run_coro_as_sync = later  # type: ignore[assignment]
    AioSqliteConfiguration.begin_transaction = begin(AioSqliteConfiguration.begin_transaction)  # type: ignore
    config = uvicorn.Config(create_app(final=True), log_level="warning", access_log=False, lifespan="on")
    server = uvicorn.Server(config)
    threading.Thread(target=_end_in_time, args=(server,), daemon=True).start()
    server.run(sockets=[socket.socket(fileno=socket_fd)])
    return 0 if server.started else 3


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
