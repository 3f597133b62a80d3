"""What a run prints is no reason for it to end: it goes on when nobody reads that any more.

A worker reads what its flow runs print, so ``kill -9`` of the worker breaks their pipes, as the end of ``tee`` does in
a shell. ``print`` then raises BrokenPipeError, and rich, with which Prefect prints its log lines, exits the program.
What is printed afterwards goes nowhere; the log files of the run have it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO

from rich.console import Console


def outlive_readers() -> None:
    """From now on no output of this process fails because its reader is gone."""
    Console.on_broken_pipe = _unread  # type: ignore
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


class _Outliving(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            _to_nowhere(self.fileno())
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


def _unread(console: Console) -> None:
    """In place of ``Console.on_broken_pipe``."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no file of the system
        _to_nowhere(console.file.fileno())


def _to_nowhere(fd: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)
