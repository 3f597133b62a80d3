"""Messages arrive whole or not at all, and a large one at once."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

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


def test_a_large_message_is_received_at_once(ends: tuple[Channel, socket.socket]) -> None:
    """Each time, the receiver waits for the interpreter's lock: 5 ms where other threads of Python work."""
    here, other = ends[0], Channel(ends[1])
    calls: list[int] = []

    class Noted:
        def recv_into(self, *arguments: Any) -> int:
            calls.append(count := here._connection.recv_into(*arguments))
            return count

    sender = threading.Thread(target=other.send, args=(bytes(8 << 20),))
    sender.start()
    assert len(Channel(Noted()).receive()) == 8 << 20  # type: ignore[arg-type]
    sender.join()
    assert len(calls) == 2, "the length, and the rest"
