"""One sandbox while it runs: what it writes, what it uses, and its end.

Guarantees:
- When ``ended`` is true every process of the sandbox is gone: the kernel ends a namespace's process 1, which is what is
  waited for, only after all others of the namespace.
- Whatever passes its time, memory, number of files or output is killed about ``LOOK_S`` seconds later.
- No more than the limit of output is kept in memory here.

Memory is bounded twice: the kernel bounds each process's address space, and this process adds up what all of them use
(proportionally, so that shared pages count once) and what their sockets may hold, which is no process's. Control groups
would do both, but on most machines they are not ours to make.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Literal

from forge_core.processes.guard import descendants
from forge_core.sandbox.bubblewrap import forbidden
from forge_core.sandbox.limits import Limits

LOOK_S = 0.02
END_S = 10.0
_PAGE = os.sysconf("SC_PAGE_SIZE")
_CHUNK = 65536
Excess = Literal["time", "memory", "files", "output"]


class Process:
    """Follows ``bwrap``, just started, whose reports come over the pipe ``status``; ``close`` it. ``root`` is the
    folder that the code has as ``/``.

    ``excess`` is the limit that it was killed for, if any; ``stdout`` and ``stderr`` are what it wrote so far.
    """

    def __init__(
        self, bwrap: subprocess.Popen[bytes], status: IO[str], root: Path, limits: Limits, timeout_s: float
    ) -> None:
        self.ended = False
        self.excess: Excess | None = None
        self.stdout, self.stderr = bytearray(), bytearray()
        self.started = self._looked = time.monotonic()
        self._deadline = self.started + timeout_s
        self._bwrap, self._status, self._root, self.limits = bwrap, status, root, limits
        self._room = limits.output_bytes + 1  # one more than the limit shows that there was more
        self._pid, self._pidfd = 0, -1
        try:
            self._pid = json.loads(status.readline())["child-pid"]
            self._pidfd = os.pidfd_open(self._pid)
        except (ValueError, ProcessLookupError):  # there never was one, or no longer
            self._end()

    @property
    def exit_status(self) -> int:
        """As a shell gives it: 128 plus the number of the signal that ended it."""
        status = self._bwrap.returncode
        return 128 - status if status < 0 else status

    def send(self, line: bytes) -> None:
        """Write to its standard input, where that is a pipe. What it does not read before it ends is lost."""
        assert self._bwrap.stdin is not None
        if self.ended:
            return
        os.set_blocking(self._bwrap.stdin.fileno(), False)
        view = memoryview(line)
        while view and not self.ended:
            try:
                view = view[os.write(self._bwrap.stdin.fileno(), view) :]
            except BlockingIOError:
                look([self])
            except BrokenPipeError:  # it ends, or does not want to know
                return

    def kill(self, excess: Excess | None = None) -> None:
        """End it and all that it started; ``watch`` sees the end."""
        if not self.ended:
            self.excess = self.excess or excess
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """End it and wait until all is gone. Idempotent."""
        self.kill("time")
        watch([self], lambda: self.ended)

    def handles(self) -> list[int]:
        """File descriptors that have something to say."""
        return [] if self.ended else [self._pidfd, *(stream.fileno() for stream, _ in self._streams())]

    def read(self, fd: int) -> None:
        """Take in what ``fd``, one of ``handles``, says."""
        if fd == self._pidfd:
            self._end()
            return
        for stream, kept in self._streams():
            if stream.fileno() == fd and not self._take(stream, kept):
                stream.close()

    def check(self) -> None:
        """Kill it if it has passed a limit."""
        now = time.monotonic()
        if max(len(self.stdout), len(self.stderr)) >= self._room:
            self.kill("output")
        elif now > self._deadline:
            self.kill("time")
        elif now > self._looked + LOOK_S and not self.ended:
            self._looked = now
            self._check_use()

    def _check_use(self) -> None:
        tree = [self._pid, *descendants(self._pid)]
        limit = self.limits.memory_bytes - _in_sockets(self._pid)
        if sum(map(_resident, tree)) > limit and sum(map(_proportional, tree)) > limit:
            self.kill("memory")
        with contextlib.suppress(OSError):  # it has just ended
            set_up = os.path.samefile(f"/proc/{self._pid}/root", self._root)  # before, its root is still the host's
            disk = os.statvfs(f"/proc/{self._pid}/root/tmp")
            if set_up and disk.f_files - disk.f_ffree > self.limits.files:
                self.kill("files")

    def _streams(self) -> list[tuple[IO[bytes], bytearray]]:
        both = ((self._bwrap.stdout, self.stdout), (self._bwrap.stderr, self.stderr))
        return [(stream, kept) for stream, kept in both if stream is not None and not stream.closed]

    def _take(self, stream: IO[bytes], kept: bytearray) -> bool:
        """Read once; whether there may be more."""
        chunk = os.read(stream.fileno(), _CHUNK)
        kept += chunk[: self._room - len(kept)]
        return bool(chunk)

    def _end(self) -> None:
        """Its processes are gone: take what they left in the pipes. Raises SandboxError when none was ever started."""
        self.ended = True
        try:
            self._bwrap.wait(END_S)
        except subprocess.TimeoutExpired:
            self._bwrap.kill()
            self._bwrap.wait()
        for stream, kept in self._streams():
            while self._take(stream, kept):
                pass
            stream.close()
        with self._status:
            code_was_started = "exit-code" in self._status.read()
        if self._bwrap.stdin is not None:
            self._bwrap.stdin.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
        if self.excess is None and not code_was_started:
            raise forbidden(self.stderr.decode(errors="replace"))


def watch(processes: Sequence[Process], until: Callable[[], bool]) -> None:
    """Follow ``processes`` until ``until`` says so. Raises SandboxError when one could not be set up."""
    while not until():
        look(processes)


def look(processes: Sequence[Process]) -> None:
    """Wait ``LOOK_S`` seconds at most for something to happen, and see to it."""
    owners = {fd: process for process in processes for fd in process.handles()}
    poller = select.poll()
    for fd in owners:
        poller.register(fd, select.POLLIN)
    for fd, _ in poller.poll(LOOK_S * 1000):
        if fd in owners[fd].handles():
            owners[fd].read(fd)
    for process in processes:
        process.check()


def _in_sockets(pid: int) -> int:
    """Bytes that the sockets in the network namespace of ``pid`` can hold; 0 when it is gone."""
    with contextlib.suppress(OSError):
        return (Path(f"/proc/{pid}/net/unix").read_text().count("\n") - 1) * _socket_bytes()  # one line is the heading
    return 0


@lru_cache(maxsize=1)
def _socket_bytes() -> int:
    """Of each: a larger buffer cannot be asked for (``seccomp.py``)."""
    return int(Path("/proc/sys/net/core/wmem_default").read_text())


def _resident(pid: int) -> int:
    """Bytes, shared ones included; 0 when it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


def _proportional(pid: int) -> int:
    """Bytes, with every shared page divided among those that share it; 0 when it is gone."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024
    return 0
