"""Messages between a grading process and its parent: a length (4 bytes, big endian), then a pickle."""

from __future__ import annotations

import os
import pickle
import select
import struct
import time
from typing import Any

_LENGTH = struct.Struct(">I")


def send(fd: int, message: Any) -> None:
    """Write ``message`` whole. Raises BrokenPipeError when the other side is gone."""
    body = pickle.dumps(message)
    data = memoryview(_LENGTH.pack(len(body)) + body)
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int, timeout_s: float | None = None) -> Any:
    """Read one message. Raises EOFError when the other side is gone, TimeoutError after ``timeout_s``."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = _LENGTH.unpack(_read(fd, _LENGTH.size, deadline))
    return pickle.loads(_read(fd, length, deadline))


def _read(fd: int, size: int, deadline: float | None) -> bytes:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    data = b""
    while len(data) < size:
        wait_ms = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
        if not poller.poll(wait_ms):
            raise TimeoutError
        chunk = os.read(fd, size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data
