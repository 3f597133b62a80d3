"""Turns on a GPU that generator and trainer share.

Invariants:
- Work of one side runs together; the two sides never run at the same time.
- Turns are given in the order of asking: a side that never pauses cannot keep the other out.
- ``leave[side]`` is called, by whoever takes the turn next, before the other side's first work; ``enter[side]`` before
  a side's first work after that. Both are called by one thread at a time, and by nobody while work runs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from forge_core.stop import StopToken

POLL_S = 0.2


class Turns:
    def __init__(
        self, leave: Mapping[str, Callable[[], None]], enter: Mapping[str, Callable[[], None]], stop: StopToken
    ) -> None:
        self._leave, self._enter, self._stop = leave, enter, stop
        self._changed = threading.Condition()
        self._waiting: deque[str] = deque()
        self._side: str | None = None
        self._working = 0

    @contextmanager
    def on(self, side: str) -> Iterator[None]:
        """Do the body as work of ``side``. Raises Stopped while it waits."""
        self._begin(side)
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _begin(self, side: str) -> None:
        with self._changed:
            self._waiting.append(side)
            try:
                while not self._may_begin(side):
                    self._stop.check()
                    self._changed.wait(POLL_S)
                self._take(side)
            finally:
                self._waiting.remove(side)
                self._changed.notify_all()
            self._working += 1

    def _may_begin(self, side: str) -> bool:
        first = next(waiting for waiting in self._waiting)
        return (self._side == side or self._working == 0) and first == side

    def _take(self, side: str) -> None:
        """Make the turn ``side``'s; a call that fails leaves it nobody's, and is made again by the next."""
        if self._side == side:
            return
        before, self._side = self._side, None
        if before is not None:
            self._leave.get(before, _nothing)()
        self._enter.get(side, _nothing)()
        self._side = side


class NoTurns(Turns):
    """Everybody has a device of their own, or room on a shared one: nobody waits."""

    def __init__(self) -> None:
        super().__init__({}, {}, StopToken())

    @contextmanager
    def on(self, side: str) -> Iterator[None]:
        yield


def _nothing() -> None:
    pass
