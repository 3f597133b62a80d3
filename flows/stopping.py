"""Every way to stop a run ends in one place: the run's stop token.

A ``StopWatcher`` inside the flow body sets the token on Ctrl-C, on SIGTERM, on a ``control/stop-<n>.json`` in the
store (``forge stop``) and on a Cancelling or Cancelled flow run (the Prefect UI). Work ends where it looks at the token
and the flow returns a Cancelled state, so the run stays resumable.

Signals. Prefect's flow engine replaces the SIGTERM handler around the flow body by one that raises
``TerminationSignal`` in the main thread, marks the run Crashed and sends the signal to this process once more. The
watcher therefore installs its handlers inside the flow body and puts Prefect's back when it leaves. A second Ctrl-C
ends this process at once (status 130) together with the process groups of its children. Where the flow does not run in
the main thread Python lets nobody install handlers; the other ways still work.

On a worker Prefect ends the process of a stopped flow run with an exception, ``CancelledRun`` or ``CrashedRun``; its
log gets a line of it in place of two tracebacks, which would look like a failure (``say_stopped_in_a_line``).

Requests of the store are numbered. Those from before are history: a run that was stopped can be resumed. What is
before, ``starting`` says where it can be long until there is a watcher, as while a command checks its input and starts
a server; else it is the making of the watcher.

Guarantees: a source that cannot be asked (an outage of the store or of the Prefect server) never fails the run and
never delays the other source; ``errors`` counts what failed.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any
from uuid import UUID

from flows.asking_once import client_asking_once
from flows.queued import limit_at_exit
from forge_core.stop import StopToken
from forge_core.store import Store, layout

if TYPE_CHECKING:
    from prefect.states import State

POLL_S = 2.0
STOP, SIGTERM, CANCELLED = "forge stop", "SIGTERM", "cancelled in Prefect"  # reasons
_log = logging.getLogger(__name__)
_starting: dict[tuple[str, str], int] = {}  # the first request that counts, by store and run


@contextmanager
def starting(store: Store, run_id: str) -> Iterator[None]:
    """A watcher that is made inside, by whichever function of this process, heeds requests to stop ``run_id`` from here
    on."""
    key = (store.uri, run_id)
    outermost = key not in _starting
    if outermost:
        _starting[key] = next_request(store, run_id)
    try:
        yield
    finally:
        if outermost:
            del _starting[key]


class StopWatcher:
    """Context manager that sets ``stop`` when somebody wants ``run_id`` to end."""

    def __init__(self, stop: StopToken, store: Store, run_id: str, flow_run_id: object | None) -> None:
        self.errors = 0
        self._stop = stop
        self._store = store
        self._run_id = run_id
        self._flow_run_id = flow_run_id
        self._left = threading.Event()
        self._handlers: dict[int, Any] = {}
        self._signals: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._interrupts = 0
        noted = _starting.get((store.uri, run_id))
        self._request = next_request(store, run_id) if noted is None else noted

    def __enter__(self) -> StopWatcher:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._on_signal)
            threading.Thread(target=self._hand_on_signals, name="forge-signals", daemon=True).start()
        self._start("stop-requests", lambda: self._requested(self._request))
        if self._flow_run_id is not None:
            self._start("flow-run-state", self._cancelled)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        limit_at_exit()
        if self._stop.is_set():
            say_stopped_in_a_line()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._signals.put(None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                kill_descendants()
                os._exit(130)
        self._signals.put(number)  # reentrant, unlike the token's lock, which the interrupted code may hold

    def _hand_on_signals(self) -> None:
        while (number := self._signals.get()) is not None:
            self._stop.set("Ctrl-C" if number == signal.SIGINT else self._terminated())

    def _terminated(self) -> str:
        """A worker ends a flow run that was cancelled with SIGTERM too: only the server can tell."""
        with suppress(Exception):  # best effort by contract
            return (self._cancelled() if self._flow_run_id is not None else None) or SIGTERM
        return SIGTERM

    def _start(self, name: str, look: Callable[[], str | None]) -> None:
        threading.Thread(target=self._watch, args=(name, look), name=f"forge-{name}", daemon=True).start()

    def _watch(self, name: str, look: Callable[[], str | None]) -> None:
        while not self._left.is_set() and not self._stop.is_set():
            self._watch_once(name, look)
            self._left.wait(POLL_S)

    def _watch_once(self, name: str, look: Callable[[], str | None]) -> None:
        try:
            reason = look()
        except Exception as error:  # best effort by contract; counted, and the first one is logged
            self.errors += 1
            if self.errors == 1:
                _log.warning("cannot look for %s, the run goes on: %r", name, error)
            return
        if reason is not None and not self._left.is_set():
            self._stop.set(reason)

    def _requested(self, number: int) -> str | None:
        key = layout.stop(self._run_id, number)
        return self._store.read_json(key).get("reason", STOP) if self._store.exists(key) else None

    def _cancelled(self) -> str | None:
        state = _flow_run_state(self._flow_run_id)
        if state is None or not (state.is_cancelling() or state.is_cancelled()):
            return None
        return f"{CANCELLED}: {state.message}" if state.message else CANCELLED


def say_stopped_in_a_line() -> None:
    """From here on Prefect's engine logs without a traceback that a flow run was stopped."""
    for name in ("prefect.flow_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    from prefect.exceptions import CancelledRun, CrashedRun

    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, CancelledRun | CrashedRun):
        record.msg, record.args, record.exc_info = "The flow run was %s", (str(error),), None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


def request_stop(store: Store, run_id: str, reason: str = STOP) -> int:
    """Ask the run to stop, from any machine that reaches the store; returns the number of the request."""
    body = {
        "reason": reason,
        "requested_at": datetime.now(UTC).isoformat(),
        "host": os.uname().nodename,
        "pid": os.getpid(),
    }
    number = next_request(store, run_id)
    while not store.put_new_json(layout.stop(run_id, number), body):
        number += 1
    return number


def next_request(store: Store, run_id: str) -> int:
    """The number of the first stop request that does not exist; those before it are history."""
    number = 0
    while store.exists(layout.stop(run_id, number)):
        number += 1
    return number


def kill_descendants() -> None:
    """Kill every descendant of this process, with the process group it leads if it has its own. Linux only."""
    own = os.getpgrp()
    for pid in _descendants(os.getpid()):
        try:
            group = os.getpgid(pid)
            if group == own:
                os.kill(pid, signal.SIGKILL)
            else:
                os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:  # gone meanwhile, perhaps with its group
            continue


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # the process ended meanwhile
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, open_ = [], [pid]
    while open_:
        below = children.get(open_.pop(), [])
        found += below
        open_ += below
    return found


def _flow_run_state(flow_run_id: object) -> State[Any] | None:
    """The flow run's state, asked once with a short timeout and without retries."""
    with client_asking_once(3.0) as client:
        run = client.read_flow_run(UUID(str(flow_run_id)))
    return run.state
