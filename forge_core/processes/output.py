"""Output of a process is no reason for it to end or to fail: it goes on when nobody reads that any more.

Once the reader of a pipe is gone, what is written to it goes nowhere.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


def outlive_readers() -> None:
    """From now on no ``print`` of this process fails because its reader is gone."""
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


def to_nowhere(fd: int) -> None:
    """Let what is written to ``fd`` from now on be lost."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)


class _Outliving(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            to_nowhere(self.fileno())
            return super().write(data)


def _outliving(stream: TextIO) -> TextIO:
    """The same stream; what is not a file of the system (as under pytest) is returned as it is."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # itself, with PYTHONUNBUFFERED
    if not isinstance(raw, io.FileIO) or isinstance(raw, _Outliving):
        return stream
    stream.flush()
    binary = io.BufferedWriter(_Outliving(raw.fileno(), "wb", closefd=False))
    return io.TextIOWrapper(binary, encoding=stream.encoding, errors=stream.errors, line_buffering=True)
