"""Grading processes that can be killed.

Guarantees:
- A grade that outlives its timeout costs that one item: its process (group) is killed, and the next item starts a
  new one. A process that dies by itself likewise. SIGALRM is never used.
- Outcomes come in the order of the items; several calls may share the pool.
- Rewards that cannot be built are a RewardError when the pool is made, not at the first item.
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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forge_core.rewards import wire
from forge_core.rewards.grading import Outcome, RewardItem, Spec
from forge_core.rewards.resolve import RewardError

if TYPE_CHECKING:
    from forge_core.stop import StopToken

START_TIMEOUT_S = 120.0  # importing the user's module and what it needs
_CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from forge_core.rewards.worker import main; main()"


class _Process:
    """One grading process, started when it is needed and again after each loss."""

    def __init__(self, specs: Sequence[Spec], timeout_s: float):
        self._specs, self._timeout_s = list(specs), timeout_s
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and build the rewards in it. Raises RewardError."""
        self._child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a group of its own: killed with all it started, and Ctrl-C is the parent's
        )
        paths = ", ".join(spec.path for spec in self._specs)
        try:
            problem = self._ask((self._specs, os.getpid()), START_TIMEOUT_S)
        except TimeoutError:
            problem = f"rewards.functions: importing {paths} took longer than {START_TIMEOUT_S:.0f} s"
        except (EOFError, BrokenPipeError):
            problem = f"rewards.functions: the grading process ended ({self.end()}) while importing {paths}"
        if problem is not None:
            self.end()
            raise RewardError(problem)

    def grade(self, item: RewardItem) -> Outcome:
        """Grade one item. Raises RewardError when a replacement process cannot be started."""
        if self._child is None:
            self.start()
        try:
            return self._ask(item, self._timeout_s)
        except TimeoutError:
            self.end()
            return Outcome({}, "timeout", f"grading took longer than rewards.timeout_s={self._timeout_s:g} s")
        except (EOFError, BrokenPipeError):
            return Outcome({}, "error", f"the grading process ended ({self.end()})")

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
        """From another thread: kill the process, so that the owning thread finds the pipe closed."""
        child = self._child
        if child is not None and child.poll() is None:
            kill_group(child.pid)

    def _ask(self, message: Any, timeout_s: float) -> Any:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        wire.send(child.stdin.fileno(), message)
        return wire.receive(child.stdout.fileno(), timeout_s)


class _Call:
    """The outcomes of one ``WorkerPool.grade``, filled in by the threads."""

    def __init__(self, size: int):
        self._lock, self._missing = threading.Lock(), size
        self.outcomes: list[Outcome | None] = [None] * size
        self.failure: RewardError | None = None
        self.over = threading.Event()

    def put(self, index: int, outcome: Outcome) -> None:
        with self._lock:
            self.outcomes[index] = outcome
            self._missing -= 1
            if self._missing == 0:
                self.over.set()

    def fail(self, error: RewardError) -> None:
        self.failure = error
        self.over.set()


class WorkerPool:
    """``workers`` grading processes for the rewards ``specs``; ``timeout_s`` is for all rewards of one item."""

    def __init__(self, specs: Sequence[Spec], workers: int, timeout_s: float):
        self._jobs: queue.SimpleQueue[tuple[_Call, int, RewardItem] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._processes = [_Process(specs, timeout_s) for _ in range(workers)]
        started: queue.SimpleQueue[RewardError | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=(process, started), name=f"grader-{number}", daemon=True)
            for number, process in enumerate(self._processes)
        ]
        for thread in self._threads:
            thread.start()
        problems = [problem for problem in (started.get() for _ in self._threads) if problem is not None]
        if problems:
            self.close()
            raise problems[0]

    def grade(self, items: Sequence[RewardItem], stop: StopToken | None = None) -> list[Outcome]:
        """Outcomes in the order of ``items``. Raises Stopped soon after ``stop`` is set, and RewardError."""
        call = _Call(len(items))
        for index, item in enumerate(items):
            self._jobs.put((call, index, item))
        while items and not call.over.wait(0.1):
            if stop is not None and stop.is_set():
                call.over.set()  # the threads skip what is left
                stop.check()
            if self._closed.is_set():
                raise RewardError("rewards: the grading processes were closed while grading")
        if call.failure is not None:
            raise call.failure
        return [outcome for outcome in call.outcomes if outcome is not None]

    def close(self) -> None:
        """End the processes at once and their threads; calls in progress raise RewardError."""
        self._closed.set()
        for _ in self._threads:
            self._jobs.put(None)
        for process in self._processes:
            process.interrupt()
        for thread in self._threads:
            thread.join()

    def _serve(self, process: _Process, started: queue.SimpleQueue[RewardError | None]) -> None:
        """Body of the thread that owns ``process``. It outlives the process: the kernel kills a grading process when
        the thread that started it ends."""
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
