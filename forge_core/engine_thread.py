"""One thread that owns an engine.

Torch keeps grad mode, autograd threading, flushing of denormals and the CUDA device per thread, while tasks run on
whatever thread the task runner gives them. So an engine's work happens in one thread of its own, and tasks wait.

Guarantees:
- Calls run one at a time, the lowest ``priority`` first, in order of arrival within a priority.
- An exception of the called function (even SystemExit) reaches the caller with its own traceback; the thread lives on.
- A caller that is interrupted while it waits (KeyboardInterrupt) leaves a working thread behind; its call is dropped
  if it has not started, and its result if it has.
- A queued call whose ``stop`` token is set is not started: its caller gets ``forge_core.stop.Stopped``.
- The thread is a daemon: it never keeps the process alive.
- Beside other threads of Python it gets the interpreter when it is back from work that needs none (a kernel, a file),
  ``SWITCH_S`` after it asks at the latest. Python's own limit is ten times that, and a training step asks hundreds of
  times.
"""

from __future__ import annotations

import contextvars
import heapq
import itertools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from forge_core.stop import StopToken

T = TypeVar("T")
SWITCH_S = 0.0005  # beside two busy threads a step of 60 small layers takes 74 ms with it and 121 ms without


class EngineClosed(RuntimeError):
    """The engine was shut down before this call could start."""


@dataclass(order=True)
class _Call:
    priority: int
    arrival: int
    run: Callable[[], Any] = field(compare=False)
    stop: StopToken | None = field(compare=False)
    future: Future[Any] = field(compare=False, default_factory=Future)


def _execute(call: _Call) -> None:
    if not call.future.set_running_or_notify_cancel():
        return
    try:
        if call.stop is not None:
            call.stop.check()
        result = call.run()
    except BaseException as error:  # belongs to the caller, whatever it is; this thread goes on
        call.future.set_exception(error)
        del call  # this frame is in the error's traceback: the cycle would keep the call's arguments alive
    else:
        call.future.set_result(result)


class EngineThread:
    """A daemon thread named ``name`` in which torch uses ``threads`` CPU threads (None: torch's own choice)."""

    def __init__(self, name: str, threads: int | None = None) -> None:
        self.name = name
        self._threads = threads
        self._arrivals = itertools.count()
        self._calls: list[_Call] = []
        self._closed = False
        self._changed = threading.Condition()
        sys.setswitchinterval(SWITCH_S)
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def call(self, fn: Callable[..., T], *args: Any, priority: int = 0, **kwargs: Any) -> T:
        """Run ``fn(*args, **kwargs)`` in the thread and return its result.

        A keyword ``stop`` that holds a ``StopToken`` is passed on to ``fn`` and also looked at just before the
        call starts. Called from the engine's own thread, ``fn`` runs at once. Raises ``EngineClosed`` after
        :meth:`close`.
        """
        if threading.current_thread() is self._thread:
            return fn(*args, **kwargs)
        stop = kwargs.get("stop")
        run = partial(contextvars.copy_context().run, fn, *args, **kwargs)  # metrics belong to the caller's stage
        call = self._enqueue(run, priority, stop if isinstance(stop, StopToken) else None)
        try:
            return call.future.result()
        finally:
            call.future.cancel()  # has an effect only when the caller was interrupted before the call started
            del call  # a raised error's traceback would hold it, and so itself, until the next garbage collection

    def close(self, timeout: float | None = 10.0) -> None:
        """Refuse further and queued calls, and wait up to ``timeout`` seconds for the running one. Idempotent."""
        with self._changed:
            self._closed = True
            queued, self._calls = self._calls, []
            self._changed.notify_all()
        for call in queued:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(self._closed_error())
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _enqueue(self, run: Callable[[], Any], priority: int, stop: StopToken | None) -> _Call:
        with self._changed:
            if self._closed:
                raise self._closed_error()
            call = _Call(priority, next(self._arrivals), run, stop)
            heapq.heappush(self._calls, call)
            self._changed.notify_all()
        return call

    def _closed_error(self) -> EngineClosed:
        return EngineClosed(f"engine thread {self.name!r} is closed: create the engine again to go on")

    def _loop(self) -> None:
        set_torch_state(self._threads)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closed)
                if self._closed:
                    return
                call = heapq.heappop(self._calls)
            _execute(call)
            del call  # an idle engine must not hold the arguments and result of its last call


def set_torch_state(threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    torch.autograd.set_multithreading_enabled(False)
