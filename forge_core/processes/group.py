"""A command in a session of its own whose whole family ends with it, or with us.

Guarantees:
- However this process ends (exit, exception, ``kill -9``), everything that the command started ends within seconds.
- A terminal's Ctrl-C does not reach the command: its owner decides.
- Everything it prints goes to its log file, which ``tail`` reads for error messages.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")
TAIL_BYTES = 64 * 1024
ERROR = re.compile(r"\b[\w.]*(?:Error|Exception): .+")  # the end of a traceback, whatever a logger puts before it


class ChildDied(RuntimeError):
    """A child process of an engine ended although nobody asked it to."""


class ChildGroup:
    """``argv``: the command; ``env``: additions to this process's environment (None removes a name); ``pass_fds``:
    file descriptors that it inherits. ``pid`` is the command's own."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str | None] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        life, self._life = os.pipe()  # neither is inherited by other children: Python's pipes are close-on-exec
        reports, report = os.pipe()
        self._closing = threading.Lock()
        with log.open("ab") as output:
            self._start = output.tell()
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), str(life), str(report), *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment({**(env or {}), "FORGE_PASS_FDS": ",".join(map(str, pass_fds)) or None}),
                pass_fds=(life, report, *pass_fds),
                start_new_session=True,
            )
        os.close(life)
        os.close(report)
        with os.fdopen(reports) as lines:
            self.pid = int(lines.readline() or 0)
        if not self.pid:
            self.kill()
            raise ChildDied(f"{name} did not start: {self.tail(5) or argv[0]} (log: {log})")

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._guard.poll()

    def alive(self) -> bool:
        return self.poll() is None

    def wait(self, timeout: float | None = None) -> int:
        """Exit status; raises subprocess.TimeoutExpired."""
        return self._guard.wait(timeout)

    def terminate(self, grace_s: float) -> None:
        """SIGTERM to the command; after ``grace_s`` seconds the whole family is killed."""
        if self.alive():
            _send(self.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while self.alive() and time.monotonic() < deadline:
                time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        """End the whole family now. Idempotent."""
        with self._closing:
            if self._life >= 0:
                os.close(self._life)
                self._life = -1
        try:
            self._guard.wait(15.0)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        _send(-getattr(self, "pid", 0), signal.SIGKILL)  # in case the guard was killed before it could do it

    def tail(self, lines: int = 30) -> str:
        """The end of the log."""
        with self.log.open("rb") as file:
            file.seek(max(self.log.stat().st_size - TAIL_BYTES, 0))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])

    def errors(self, count: int = 5) -> list[str]:
        """The last ``count`` different errors that the command has logged, oldest first: what the processes that it
        started died of does not always reach it."""
        with self.log.open("rb") as file:
            file.seek(max(self._start, self.log.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return list(dict.fromkeys(ERROR.findall(text)))[-count:]


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    merged: dict[str, str | None] = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _send(pid: int, number: int) -> None:
    if pid == 0:
        return
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):  # gone
        return
