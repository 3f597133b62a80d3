"""A child process that is one rank of an actor.

    python -c "..." FD    with a socket to its owner as file descriptor FD

The first message says what to make; then come calls, answered in any order, and pings, answered at once whatever the
actor is doing. It ends when the owner closes the socket or is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
from concurrent.futures import Future
from functools import partial
from typing import Any

from forge_core.processes.channel import Channel
from forge_core.services import cargo
from forge_core.services.errors import packed
from forge_core.services.running import Running


def main() -> None:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    with contextlib.suppress(EOFError, OSError):  # the owner has gone: nobody is left to tell
        if (running := _made(channel)) is not None:
            _serve(channel, running)
    os._exit(0)  # whatever the actor is still doing


def _made(channel: Channel) -> Running | None:
    start = channel.receive()
    try:
        arguments, keywords = cargo.load(start["arguments"])
        found: Any = importlib.import_module(start["module"])
        for name in start["name"].split("."):
            found = getattr(found, name)
        running = Running(found, start["rank"], start["size"], arguments, keywords)
    except BaseException as error:
        channel.send(("raised", 0, packed(error)))
        return None
    channel.send(("value", 0, cargo.dump(None)))
    return running


def _serve(channel: Channel, running: Running) -> None:
    while True:
        kind, number, body = channel.receive()
        if kind == "ping":
            channel.send(("value", number, cargo.dump(None)))
            continue
        try:
            running.call(*cargo.load(body)).add_done_callback(partial(_answer, channel, number))
        except Exception as error:  # there is no such method, or its arguments cannot be read here
            channel.send(("raised", number, packed(error)))


def _answer(channel: Channel, number: int, future: Future[Any]) -> None:
    try:
        answer: tuple[str, int, Any] = ("value", number, cargo.dump(future.result()))
    except BaseException as error:  # what the actor raised, or pickling its value
        answer = ("raised", number, packed(error))
    with contextlib.suppress(OSError):  # the owner has gone
        channel.send(answer)
