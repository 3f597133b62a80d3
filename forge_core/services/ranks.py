"""The owner's end of one rank of an actor: in a child process, or on threads of this process.

Guarantees of both kinds:
- Every call gets exactly one answer: a value, what the actor raised, or ``ActorDied``.
- ``on_death`` is called once, from any thread, when the rank is gone without having been asked to go.
- A call never waits for the other side to read it: a process that stands still holds up no event loop.
- A child process ends with its owner, with all that it started (``forge_core/processes``).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from forge_core.processes import ChildGroup
from forge_core.processes.channel import Channel
from forge_core.services import cargo
from forge_core.services.errors import ActorDied, ActorError, packed, raisable, unpacked
from forge_core.services.running import Running

_CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from forge_core.services.child import main; main()"


class Rank(Protocol):
    ready: Future[None]
    """Done when the actor has been made; its exception is what making it raised."""

    def call(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Future[Any]: ...

    def ping(self) -> Future[Any]:
        """Done when the rank is still there to answer."""
        ...

    def stop(self) -> None:
        """End it now; open calls raise ActorDied. Idempotent."""
        ...


class ProcessRank:
    """A rank in a child process. ``environment``: additions to this process's."""

    def __init__(
        self,
        actor_class: type,
        name: str,
        rank: int,
        size: int,
        made_with: tuple[tuple[Any, ...], dict[str, Any]],
        *,
        environment: Mapping[str, str],
        log: Path,
        on_death: Callable[[str], None],
    ) -> None:
        self.ready: Future[None] = Future()
        self._name, self._on_death = name, on_death
        self._lock, self._numbers = threading.Lock(), itertools.count(1)
        self._open: dict[int, Future[Any]] = {0: self.ready}
        self._stopped = self._gone = False
        arguments = cargo.dump(made_with)  # before there is a process
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        argv = [sys.executable, "-c", _CHILD, str(theirs.fileno()), json.dumps(sys.path)]
        self._group = ChildGroup(name, argv, log=log, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        start = {"module": actor_class.__module__, "name": actor_class.__qualname__, "rank": rank, "size": size}
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outgoing.put({**start, "arguments": arguments})
        for what, work in (("writer", self._write), ("reader", self._read)):
            threading.Thread(target=work, name=f"{name}-{what}", daemon=True).start()

    def call(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Future[Any]:
        return self._send("call", (method, arguments, keywords))

    def ping(self) -> Future[Any]:
        return self._send("ping", None)

    def stop(self) -> None:
        self._stopped = True
        self._group.kill()
        self._channel.close()

    def _send(self, kind: str, body: Any) -> Future[Any]:
        future: Future[Any] = Future()
        packed_body = cargo.dump(body)
        with self._lock:
            if self._gone:
                raise ActorDied(f"{self._name} is gone")
            number = next(self._numbers)
            self._open[number] = future
            self._outgoing.put((kind, number, packed_body))
        return future

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # it is gone: the reader answers
            while (message := self._outgoing.get()) is not None:
                self._channel.send(message)

    def _read(self) -> None:
        try:
            while True:
                self._take(*self._channel.receive())
        except (EOFError, OSError):
            self._end()

    def _take(self, kind: str, number: int, body: Any) -> None:
        future = self._open.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if kind == "raised":
            future.set_exception(unpacked(body))
            return
        try:
            future.set_result(cargo.load(body))
        except Exception as error:  # a class that only the actor's process has
            future.set_exception(ActorError(f"the answer cannot be read here: {type(error).__name__}: {error}"))

    def _end(self) -> None:
        self._group.kill()
        said = "; ".join(self._group.errors(1)) or "no error in its log"
        reason = "was stopped" if self._stopped else f"ended ({said}; log: {self._group.log})"
        if not self._stopped:
            self._on_death(f"{self._name} {reason}")  # first, so that whoever gets an ActorDied below knows of it
        with self._lock:
            self._gone, left = True, list(self._open.values())
            self._open.clear()
            self._outgoing.put(None)
        for future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(ActorDied(f"{self._name} {reason}"))


class ThreadRank:
    """A rank on threads of this process: for actors that wait more than they compute, or share what cannot travel."""

    def __init__(
        self, actor_class: type, name: str, rank: int, size: int, made_with: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> None:
        self.ready: Future[None] = Future()
        self._name, self._stopped = name, False
        self._running: Running | None = None
        self._open: set[Future[Any]] = set()
        making = (actor_class, rank, size, *made_with)
        threading.Thread(target=self._make, args=making, name=f"{name}-start", daemon=True).start()

    def call(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Future[Any]:
        if self._running is None or self._stopped:
            raise ActorDied(f"{self._name} is gone")
        answer: Future[Any] = Future()
        self._open.add(answer)
        try:
            inner = self._running.call(method, arguments, keywords)
        except BaseException:
            self._open.discard(answer)
            raise
        inner.add_done_callback(lambda done: self._pass_on(done, answer))
        return answer

    def ping(self) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def stop(self) -> None:
        self._stopped = True
        if self._running is not None:
            self._running.stop()
        for answer in list(self._open):
            self._settle(answer, ActorDied(f"{self._name} was stopped"), None)

    def _make(self, actor_class: type, rank: int, size: int, arguments: tuple[Any, ...], keywords: Any) -> None:
        if not self.ready.set_running_or_notify_cancel():  # nobody waits for it any more
            return
        try:
            self._running = Running(actor_class, rank, size, arguments, keywords)
        except BaseException as error:
            self.ready.set_exception(raisable(error))
            return
        if self._stopped:  # while it was made
            self._running.stop()
        self.ready.set_result(None)

    def _pass_on(self, done: Future[Any], answer: Future[Any]) -> None:
        if done.cancelled():
            self._settle(answer, ActorDied(f"{self._name} was stopped"), None)
        elif (error := done.exception()) is not None:
            self._settle(answer, _as_if_remote(error), None)
        else:
            self._settle(answer, None, done.result())

    def _settle(self, answer: Future[Any], error: BaseException | None, value: Any) -> None:
        if answer not in self._open:
            return
        self._open.discard(answer)
        if not answer.set_running_or_notify_cancel():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)


def _as_if_remote(error: BaseException) -> BaseException:
    """The same for callers, wherever the actor runs: its traceback is the cause."""
    cause = unpacked((None, "", packed(error)[2])).__cause__
    error = raisable(error)
    if error.__cause__ is None:
        error.__cause__ = cause
    return error
