"""What a run prints is no reason for it to end: it goes on when nobody reads that any more.

A worker reads what its flow runs print, so ``kill -9`` of the worker breaks their pipes, as the end of ``tee`` does in
a shell. ``print`` then raises BrokenPipeError, and rich, with which Prefect prints its log lines, exits the program.
What is printed afterwards goes nowhere; the log files of the run have it.
"""

from __future__ import annotations

import contextlib

from rich.console import Console

from forge_core.processes import output


def outlive_readers() -> None:
    """From now on no output of this process fails because its reader is gone."""
    Console.on_broken_pipe = _unread  # type: ignore
    output.outlive_readers()


def _unread(console: Console) -> None:
    """In place of ``Console.on_broken_pipe``."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no file of the system
        output.to_nowhere(console.file.fileno())
