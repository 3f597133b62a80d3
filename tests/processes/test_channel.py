"""Messages arrive whole or not at all, and a large one does not wait for other threads piece by piece."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest

from forge_core.processes.channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the socket at its other end."""
    here, there = socket.socketpair()
    yield Channel(here), there
    here.close()
    there.close()


@pytest.mark.parametrize("size", [0, 1, 1 << 20, 10 << 20])
def test_messages_of_any_size_arrive_in_order(ends: tuple[Channel, socket.socket], size: int) -> None:
    channel, other = ends[0], Channel(ends[1])
    messages = [("first", bytes(size)), ("second", None)]
    sender = threading.Thread(target=lambda: [other.send(message) for message in messages])
    sender.start()
    assert [channel.receive(), channel.receive()] == messages
    sender.join()


def test_what_comes_in_parts_is_put_together(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    mine, copy = socket.socketpair()
    Channel(mine).send(list(range(100)))
    sent = copy.recv(1 << 16)
    received: list[object] = []
    receiver = threading.Thread(target=lambda: received.append(channel.receive()))
    receiver.start()
    for part in (sent[:3], sent[3:20], sent[20:]):
        other.sendall(part)
        time.sleep(0.02)
    receiver.join(5)
    assert received == [list(range(100))]


@pytest.mark.parametrize("sent", [b"", b"\x10\0\0", b"\x10\0\0\0\0\0\0\0half"])
def test_half_a_message_is_the_end(ends: tuple[Channel, socket.socket], sent: bytes) -> None:
    channel, other = ends
    other.sendall(sent)
    other.close()
    with pytest.raises(EOFError, match="the other side closed the channel"):
        channel.receive()


def test_a_busy_thread_of_python_hardly_delays_a_large_message(ends: tuple[Channel, socket.socket]) -> None:
    """Every piece waits 5 ms for the interpreter's lock: in those of a socket's buffer, 64 MiB would take 1.9 s."""
    channel, other = ends[0], Channel(ends[1])
    done = threading.Event()
    busy = threading.Thread(target=lambda: deque(iter(done.is_set, True), maxlen=0))
    sender = threading.Thread(target=other.send, args=(bytes(64 << 20),))
    busy.start()
    try:
        started = time.monotonic()
        sender.start()
        assert len(channel.receive()) == 64 << 20
        seconds = time.monotonic() - started
    finally:
        done.set()
        busy.join()
        sender.join()
    assert seconds < 1.0
