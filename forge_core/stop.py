"""Stopping: one token per run, which every long call looks at.

Invariants:
- A token goes from clear to set once and stays set; the first reason stands.
- Setting is safe from any thread, but not from a signal handler (it takes a lock that the interrupted code may hold):
  a handler hands the signal to a thread, as ``flows/stopping.py`` does.
- A call that finds the token set ends without committing anything and raises ``Stopped``.
"""

from __future__ import annotations

import threading


class Stopped(Exception):
    """The run was asked to stop. ``reason`` says by whom (``Ctrl-C``, ``SIGTERM``, ``forge stop``, ...)."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"stopped: {reason}")
        self.reason = reason


class StopToken:
    """A thread-safe flag with a reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._reason: str | None = None

    def set(self, reason: str) -> None:
        """Ask everything that holds this token to stop; later reasons are ignored."""
        with self._lock:
            if self._reason is None:
                self._reason = reason
        self._event.set()

    def is_set(self) -> bool:
        """Whether somebody asked for a stop."""
        return self._event.is_set()

    @property
    def reason(self) -> str | None:
        """Why the token was set; None while it is clear."""
        return self._reason if self.is_set() else None

    def check(self) -> None:
        """Raise ``Stopped`` when the token is set."""
        if self.is_set():
            raise Stopped(self._reason or "unknown")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the token is set or ``timeout`` seconds have passed; returns whether it is set."""
        return self._event.wait(timeout)
