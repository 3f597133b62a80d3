"""The parent's handle on one vLLM child process.

Invariants:
- ``on_done`` gets each finished request once; ``on_death`` is called once, with the reason, when the child is gone
  without having been asked to go. Both are called in this replica's reader thread.
- A call (an update, sleep, ...) returns the child's answer, or raises ``ReplicaDied``; it never waits for a dead child.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

from forge_core.processes import ChildDied, ChildGroup
from forge_core.processes.channel import Channel
from forge_core.stop import StopToken

START_S = 900.0  # loading, compiling and capturing graphs of a large model
CALL_S = 600.0
DRAIN_S = 24 * 3600.0  # for responses of any length; their own deadline ends them before
END_S = 5.0
POLL_S = 0.1


class ReplicaDied(ChildDied):
    """The engine's process is gone, or could not do what it was asked and had to go."""


class Replica:
    """``start``: the child's first message (``engine_args``, ``version``, ``dtype``, ``probe``)."""

    def __init__(
        self,
        name: str,
        start: dict[str, Any],
        *,
        env: Mapping[str, str | None],
        log: Path,
        on_done: Callable[[dict[str, Any]], None],
        on_death: Callable[[Replica, str], None],
    ) -> None:
        self.name, self.version = name, start["version"]
        self._on_done, self._on_death = on_done, on_death
        self._calls: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._reason = ""
        self._closing = self._dead = self._failed = False
        self._ready: Future[dict[str, Any]] = Future()
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        command = [sys.executable, "-m", "forge_core.generation.vllm_engine", str(theirs.fileno())]
        self.group = ChildGroup(name, command, log=log, env=env, pass_fds=[theirs.fileno()])
        theirs.close()
        self._channel.send(start)
        threading.Thread(target=self._read, name=f"{name}-reader", daemon=True).start()

    @property
    def refused(self) -> bool:
        """Whether the child ends because it could not do what it was asked; otherwise its death has another cause."""
        return self._failed

    @property
    def alive(self) -> bool:
        return not (self._dead or self._closing or self._failed)

    def wait_ready(self, *stops: StopToken, timeout_s: float = START_S) -> dict[str, Any]:
        """What the engine says of itself once it is loaded. Raises ReplicaDied with the end of its log, and Stopped
        when one of ``stops`` is set before."""
        deadline = time.monotonic() + timeout_s
        while not wait([self._ready], POLL_S).done:
            stopped = [stop for stop in stops if stop.is_set()]
            if stopped or time.monotonic() > deadline:
                self._closing = True
                self.group.kill()
                for stop in stopped:
                    stop.check()
                raise ReplicaDied(f"{self.name} did not start within {timeout_s:.0f} s (log: {self.group.log})")
        return self._ready.result()

    def generate(self, requests: list[dict[str, Any]]) -> None:
        self._send("generate", requests)

    def abort(self, ids: list[str]) -> None:
        self._send("abort", ids)

    def call(self, kind: str, timeout_s: float = CALL_S, **arguments: Any) -> Any:
        """The child's answer to ``kind``; a child that gives none in time is ended."""
        future: Future[Any] = Future()
        with self._lock:
            if self._dead or self._closing:
                raise ReplicaDied(f"{self.name} is gone: {self._reason or 'it was shut down'}")
            number = next(self._numbers)
            self._calls[number] = future
        self._send(kind, {"call": number, **arguments})
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            self.group.kill()
            raise ReplicaDied(f"{self.name} gave no answer to {kind!r} within {timeout_s:.0f} s") from None

    def update(self, version: int, folder: Path, *, drain: bool, probe: dict[str, Any] | None) -> dict[str, float]:
        """Swap the weights; seconds of each phase. Raises ReplicaDied: after a failed swap the child is gone."""
        if version == self.version:
            return {}
        limit = CALL_S + (DRAIN_S if drain else 0.0)
        times = self.call("update", limit, version=version, folder=str(folder), drain=drain, probe=probe)
        self.version = version
        return times

    def kill(self, reason: str) -> None:
        """End a child that does not do its work, as if it had died of ``reason``."""
        self._reason = self._reason or reason
        self.group.kill()

    def close(self) -> None:
        """End the child and everything it started. Idempotent."""
        self._closing = True
        self._send("shutdown", None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.group.wait(END_S)
        self.group.kill()
        self._channel.close()

    def _send(self, kind: str, body: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone: the reader thread says so
            self._channel.send((kind, body))

    def _read(self) -> None:
        try:
            while True:
                self._handle(*self._channel.receive())
        except (EOFError, OSError):
            self.group.kill()
            self._died()

    def _handle(self, kind: str, body: Any) -> None:
        if kind == "done":
            for result in body:
                self._on_done(result)
        elif kind == "ready":
            self._ready.set_result(body)
        elif kind == "died":
            self._reason = self._reason or body
        else:
            number, result = body
            future = self._calls.pop(number)
            if kind == "reply":
                future.set_result(result)
            else:
                self._reason, self._failed = self._reason or result, True  # the child ends itself
                future.set_exception(ReplicaDied(f"{self.name}: {result} (log: {self.group.log})"))

    def _died(self) -> None:
        reason = self._reason or f"it ended with status {self.group.poll()}; the end of its log:\n{self.group.tail(15)}"
        if not self._failed:  # what it says itself is only that something has failed
            reason = "\n  ".join([reason, *(error for error in self.group.errors() if error not in reason)])
        with self._lock:
            self._dead, self._reason = True, reason
            waiting, self._calls = list(self._calls.values()), {}
        error = ReplicaDied(f"{self.name} died: {reason} (log: {self.group.log})")
        for future in waiting:
            future.set_exception(error)
        if not self._ready.done():
            self._ready.set_exception(error)
        elif not self._closing:
            self._on_death(self, reason)
