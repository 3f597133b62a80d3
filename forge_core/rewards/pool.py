"""Grading processes that can be killed.

Guarantees:
- A grade that outlives its timeout costs that one grade: its process (group) is killed, and the next grade, of the
  same item or another, starts a new one. A process that dies by itself likewise. SIGALRM is never used.
- Gradings come in the order of the items; several calls may share the pool.
- Rewards that cannot be built are a RewardError when the pool is made, not at the first item.
- One process starts with the pool; the others join when a call has lasted half a second, so that little work costs
  little.
- Processes are started by threads that live as long as they do, are not forked copies of this process (no lock or
  engine is inherited), do not import its main module, and die with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forge_core.rewards import wire
from forge_core.rewards.grading import Grading, RewardItem, Spec
from forge_core.rewards.resolve import RewardError

if TYPE_CHECKING:
    from forge_core.stop import StopToken

START_TIMEOUT_S = 120.0  # importing the user's module and what it needs
BUSY_AFTER_S = 0.5  # of one call, after which all processes work
_CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from forge_core.rewards.worker import main; main()"


class _Process:
    """One grading process, started when it is needed and again after each loss."""

    def __init__(self, specs: Sequence[Spec]):
        self._specs = list(specs)
        self._child: subprocess.Popen[bytes] | None = None
        self._interrupted = False

    def start(self) -> None:
        """Start the process and build the rewards in it. Raises RewardError."""
        if self._interrupted:
            raise RewardError("rewards: the grading processes were closed while grading")
        self._child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a group of its own: killed with all it started, and Ctrl-C is the parent's
        )
        paths = ", ".join(spec.path for spec in self._specs)
        try:
            self._send((self._specs, os.getpid()))
            problem = self._receive(START_TIMEOUT_S)
        except TimeoutError:
            problem = f"rewards.functions: importing {paths} took longer than {START_TIMEOUT_S:.0f} s"
        except (EOFError, BrokenPipeError):
            problem = f"rewards.functions: the grading process ended ({self.end()}) while importing {paths}"
        if problem is not None:
            self.end()
            raise RewardError(problem)

    def grade(self, item: RewardItem) -> list[Grading]:
        """The grades of one item by all rewards. Raises RewardError when a replacement process cannot be started."""
        done: list[Grading] = []
        while len(done) < len(self._specs):
            if self._child is None:
                self.start()
            try:
                self._send((len(done), item))
                for spec in self._specs[len(done) :]:
                    done.append(self._receive(spec.timeout_s))
            except TimeoutError:
                limit = self._specs[len(done)].timeout_s
                self.end()
                done.append(Grading(None, "timeout", f"took longer than its timeout_s={limit:g} s", limit))
            except (EOFError, BrokenPipeError):
                done.append(Grading(None, "error", f"the grading process ended ({self.end()})"))
        return done

    def end(self) -> str:
        """Kill the process with everything that it started, if there is one; returns how it ended."""
        child, self._child = self._child, None
        if child is None:
            return "not running"
        assert child.stdin is not None
        assert child.stdout is not None
        kill_group(child.pid)  # before wait: until then the number cannot belong to another process
        status = child.wait()
        child.stdin.close()
        child.stdout.close()
        return f"signal {-status}" if status < 0 else f"exit status {status}"

    def interrupt(self) -> None:
        """From another thread: kill the process for good, so that the owning thread finds the pipe closed."""
        self._interrupted = True
        child = self._child
        if child is not None and child.poll() is None:
            kill_group(child.pid)

    def _send(self, message: Any) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        wire.send(self._child.stdin.fileno(), message)

    def _receive(self, timeout_s: float) -> Any:
        assert self._child is not None
        assert self._child.stdout is not None
        return wire.receive(self._child.stdout.fileno(), timeout_s)


class _Call:
    """The gradings of one ``WorkerPool.grade``, filled in by the threads."""

    def __init__(self, size: int):
        self._lock, self._missing = threading.Lock(), size
        self.gradings: list[list[Grading]] = [[] for _ in range(size)]
        self.failure: RewardError | None = None
        self.over = threading.Event()

    def put(self, index: int, gradings: list[Grading]) -> None:
        with self._lock:
            self.gradings[index] = gradings
            self._missing -= 1
            if self._missing == 0:
                self.over.set()

    def fail(self, error: RewardError) -> None:
        self.failure = error
        self.over.set()


class WorkerPool:
    """``workers`` grading processes, at most, for the rewards ``specs``."""

    def __init__(self, specs: Sequence[Spec], workers: int):
        self._jobs: queue.SimpleQueue[tuple[_Call, int, RewardItem] | None] = queue.SimpleQueue()
        self._closed, self._busy = threading.Event(), threading.Event()
        self._processes = [_Process(specs) for _ in range(workers)]
        started: queue.SimpleQueue[RewardError | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._serve, args=(process, None if number else started), name=f"grader-{number}", daemon=True
            )
            for number, process in enumerate(self._processes)
        ]
        for thread in self._threads:
            thread.start()
        problem = started.get()
        if problem is not None:
            self.close()
            raise problem

    def grade(self, items: Sequence[RewardItem], stop: StopToken | None = None) -> list[list[Grading]]:
        """For each item, in order, the gradings of the pool's rewards. Raises Stopped soon after ``stop`` is set, and
        RewardError."""
        call, begun = _Call(len(items)), time.monotonic()
        for index, item in enumerate(items):
            self._jobs.put((call, index, item))
        while items and not call.over.wait(0.1):
            if stop is not None and stop.is_set():
                call.over.set()  # the threads skip what is left
                stop.check()
            if self._closed.is_set():
                raise RewardError("rewards: the grading processes were closed while grading")
            if time.monotonic() - begun > BUSY_AFTER_S:
                self._busy.set()
        if call.failure is not None:
            raise call.failure
        return call.gradings

    def close(self) -> None:
        """End the processes at once and their threads; calls in progress raise RewardError."""
        self._closed.set()
        self._busy.set()
        for _ in self._threads:
            self._jobs.put(None)
        for process in self._processes:
            process.interrupt()
        for thread in self._threads:
            thread.join()

    def _serve(self, process: _Process, started: queue.SimpleQueue[RewardError | None] | None) -> None:
        """Body of the thread that owns ``process``. It outlives the process: the kernel kills a grading process when
        the thread that started it ends. ``started``: where the first process tells whether the rewards can be used."""
        if started is None:
            self._busy.wait()
        else:
            try:
                process.start()
            except RewardError as error:
                started.put(error)
                return
            started.put(None)
        while (job := self._jobs.get()) is not None:
            call, index, item = job
            if call.over.is_set() or self._closed.is_set():
                continue
            try:
                call.put(index, process.grade(item))
            except RewardError as error:
                call.fail(error)
        process.end()


def kill_group(group: int) -> None:
    """SIGKILL every process of the group, which may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
