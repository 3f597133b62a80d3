"""Messages between this process and a child over a socket pair: pickles with their length in front.

Both ends are this project's own processes, so pickle is safe. Any thread may send; one thread receives. ``receive``
raises EOFError when the other side is gone.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from typing import Any

_LENGTH = struct.Struct("<Q")


class Channel:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Raises OSError when the other side is gone."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self._connection.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Any:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return pickle.loads(self._exactly(length))

    def close(self) -> None:
        """Ends a ``receive`` on either side."""
        with contextlib.suppress(OSError):  # the other side was first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _exactly(self, count: int) -> bytearray:
        buffer = bytearray(count)
        view, filled = memoryview(buffer), 0
        while filled < count:  # all at once: each return waits for the interpreter's lock
            received = self._connection.recv_into(view[filled:], 0, socket.MSG_WAITALL)
            if received == 0:
                raise EOFError("the other side closed the channel")
            filled += received
        return buffer
