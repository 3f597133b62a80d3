"""Daemon threads for work that may never come back."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Threads:
    """At most ``count`` threads work at a time. Work that is given up on (:meth:`abandon`) keeps its thread for as long
    as it lasts, and another thread takes its place; none of them holds up the end of the process."""

    def __init__(self, count: int, name: str) -> None:
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._name, self._started = name, 0
        for _ in range(count):
            self._start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Do ``work`` in the context of the caller: what it records belongs to the caller's stage."""
        done: Future[Any] = Future()
        context = contextvars.copy_context()
        self._waiting.put((done, lambda: context.run(work)))
        return done

    def abandon(self, work: Future[Any]) -> None:
        """Do not wait for ``work`` any longer: it is not begun, or goes on by itself."""
        if not work.cancel() and not work.done():
            self._start()

    def close(self) -> None:
        """No more work: idle threads end now, others with what they do."""
        for _ in range(self._started):
            self._waiting.put(None)

    def _start(self) -> None:
        self._started += 1
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            done, work = item
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
