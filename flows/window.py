"""The window of open batches: bounded staleness as a wait.

Invariants:
- ``committed(b)`` returns only once training step ``b`` has completed, so whoever calls ``committed(b - S - 1)`` before
  opening batch ``b`` has at most ``S + 1`` batches open and never samples with a version older than ``b - S``.
- The first failure among *all* open futures ends the wait with that task's own exception (a downstream future, which
  only knows that its upstream is missing, is never the one raised), with a note naming the task.
- Futures of closed batches are dropped, so memory does not grow with the number of steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from forge_core.stop import StopToken

POLL_S = 0.5  # how soon a stop is noticed; completions wake the wait at once


class Future(Protocol):
    """What the window needs of a future: Prefect's, or a plain executor's."""

    @property
    def state(self) -> Any: ...
    def wait(self, timeout: float | None = None) -> None: ...
    def result(self) -> Any: ...
    def add_done_callback(self, fn: Callable[[Any], None]) -> None: ...


class Window:
    """Open batches and their futures. ``pause`` blocks until something may have changed (a test's fake clock moves)."""

    def __init__(self, stop: StopToken | None = None, pause: Callable[[], None] | None = None) -> None:
        self.last = "train"  # the stage that ends a batch
        self._stop = stop or StopToken()
        self._changed = threading.Condition()
        self._pause = pause or self._wait_for_change
        self._open: dict[int, list[tuple[str, Future]]] = {}
        self._trained: dict[int, Future] = {}
        self._watched: set[int] = set()  # id of each open future
        self._done: set[int] = set()

    def open(self, batch: int, trained: Future, **stages: list[Any]) -> None:
        """Watch the futures of ``batch``: ``trained``, and those of each named stage."""
        named = [(f"{stage} of batch {batch}, shard {i}", f) for stage, fs in stages.items() for i, f in enumerate(fs)]
        self._open[batch] = [*named, (f"{self.last} of batch {batch}", trained)]
        self._trained[batch] = trained
        self._watched |= {id(future) for _, future in self._open[batch]}
        for _, future in self._open[batch]:
            future.add_done_callback(self._on_done)

    def committed(self, batch: int) -> None:
        """Wait until training step ``batch`` has committed; nothing to wait for when it was never opened here."""
        if batch not in self._trained:
            return
        while id(self._trained[batch]) not in self._done:
            self._raise_failure()
            self._stop.check()
            self._pause()
        self._raise_failure()
        self._close(batch)

    def drain(self) -> None:
        """Wait until every open batch has committed."""
        for batch in sorted(self._open):
            self.committed(batch)

    def settle(self, timeout_s: float) -> list[str]:
        """After a stop or a failure: give open tasks ``timeout_s`` to end; the names of those that did not."""
        waiter = threading.Event()
        for _ in range(int(timeout_s / 0.1)):
            if not self._unfinished():
                break
            waiter.wait(0.1)
        return self._unfinished()

    def _unfinished(self) -> list[str]:
        with self._changed:
            return [name for batch in self._open.values() for name, f in batch if id(f) not in self._done]

    def _on_done(self, future: Future) -> None:
        with self._changed:
            if id(future) in self._watched:  # else its batch is closed, and the id may soon be another future's
                self._done.add(id(future))
            self._changed.notify_all()

    def _wait_for_change(self) -> None:
        with self._changed:
            self._changed.wait(POLL_S)

    def _raise_failure(self) -> None:
        for batch in sorted(self._open):
            for name, future in self._open[batch]:
                if id(future) in self._done:
                    raise_if_failed(name, future)

    def _close(self, last: int) -> None:
        with self._changed:
            for batch in [b for b in self._open if b <= last]:
                closed = {id(future) for _, future in self._open.pop(batch)}
                self._watched -= closed
                self._done -= closed
                del self._trained[batch]


def raise_if_failed(name: str, future: Future) -> None:
    """Raise the own exception of a finished future that failed, with a note naming the task."""
    future.wait()  # done already; this only makes its state known
    state = future.state
    if state.is_completed() or state.name == "NotReady":  # NotReady: the failure lies upstream
        return
    try:
        future.result()
    except BaseException as error:
        error.add_note(f"in {name}")
        raise
