"""Calls that must never hurt the run: progress, artifacts, metric uploads.

Guarantees:
- :meth:`BestEffort.submit` returns at once and never raises, whatever the call does and however slow its server is.
- Calls run one at a time, in order, in one daemon thread: a hanging call costs one thread, never more.
- What could not be done is counted (``failed``, ``dropped``) and the first failure is logged: nothing is hidden.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)
_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class BestEffort:
    """Runs calls in the background.

    A call that has run for longer than ``limit_s`` seconds cannot be interrupted; until it ends, new calls are dropped.
    So are calls beyond ``capacity`` waiting ones.
    """

    def __init__(self, limit_s: float, capacity: int = 64, name: str = "best-effort") -> None:
        self.limit_s = limit_s
        self.done = 0
        self.failed = 0
        self.dropped = 0
        self.last_error: Exception | None = None
        self._calls: queue.Queue[_Call | None] = queue.Queue(capacity)
        self._busy_since: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        """Queue ``fn(*args, **kwargs)``; returns False when it was dropped instead."""
        try:
            if self._closed or self._is_late():
                raise queue.Full
            self._calls.put_nowait((fn, args, kwargs))
        except queue.Full:
            self.dropped += 1
            return False
        return True

    def close(self, timeout: float) -> bool:
        """Refuse further calls and wait up to ``timeout`` seconds for the queued ones; returns whether all ran."""
        deadline = time.monotonic() + timeout
        self._closed = True
        try:
            self._calls.put(None, timeout=timeout)
        except queue.Full:
            return False
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _is_late(self) -> bool:
        since = self._busy_since
        return since is not None and time.monotonic() - since > self.limit_s

    def _loop(self) -> None:
        while (call := self._calls.get()) is not None:
            self._busy_since = time.monotonic()
            self._run(*call)
            self._busy_since = None
            del call

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            fn(*args, **kwargs)
            self.done += 1
        except Exception as error:  # the purpose of this class; counted, kept and logged
            self.failed += 1
            self.last_error = error
            if self.failed == 1:
                _log.warning("%s failed, the run goes on: %r", getattr(fn, "__qualname__", fn), error)
