"""The next batch, read while the trainer takes a step.

Invariants:
- What is read ahead is what would be read later, since an object does not change once it is there; whoever takes it
  says whether it is still all of the batch.
- It costs nobody anything when it fails: the batch is then read by whoever needs it, and its error is theirs.
- One batch is held at most, and given away once; ``close`` ends that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

CLOSE_S = 5.0
T = TypeVar("T")
log = logging.getLogger("forge")


class ReadAhead(Generic[T]):
    """To be used by one thread."""

    def __init__(self) -> None:
        self._batch: int | None = None
        self._thread: threading.Thread | None = None
        self._found: list[T] = []

    def begin(self, batch: int, read: Callable[[], T | None]) -> None:
        """Begin to ``read`` the ``batch``, unless that was begun; what else was begun and not taken is forgotten.
        Returns at once."""
        if batch == self._batch:
            return
        found = self._found = []
        self._batch = batch
        self._thread = threading.Thread(target=_read, args=(batch, read, found), name="read-ahead", daemon=True)
        self._thread.start()

    def take(self, batch: int) -> T | None:
        """What was read of ``batch``, once it is; None where it was not begun, was not there, or could not be read."""
        if self._batch != batch or self._thread is None:
            return None
        self._thread.join()
        found, self._batch, self._thread, self._found = self._found, None, None, []
        return found[0] if found else None

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Forget what was read, and wait a little for what is being read."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._batch, self._thread, self._found = None, None, []


def _read(batch: int, read: Callable[[], T | None], found: list[T]) -> None:
    try:
        result = read()
    except Exception as error:
        log.debug("batch %d could not be read ahead: %s", batch, error)
        return
    if result is not None:
        found.append(result)
