"""A reader of the progress that goes away must not end the run."""

from __future__ import annotations

import os

from flows.session import OpenConsole


def test_a_closed_pipe_silences_the_console_and_raises_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w", buffering=1)
    console = OpenConsole(file=stream)
    for step in range(3):
        console.print(f"step {step}")
    assert console.quiet
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # let the stream's own flush at its end succeed
