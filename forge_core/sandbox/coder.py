"""Python that nobody has read, run where it can do no harm."""

from __future__ import annotations

import time
from dataclasses import dataclass

from forge_core.sandbox.bubblewrap import forbidden
from forge_core.sandbox.launcher import Launcher, Mode
from forge_core.sandbox.limits import Limits
from forge_core.sandbox.process import Process, watch

_READY = "the sandbox is ready"


@dataclass(frozen=True)
class ExecutionResult:
    """What a program did. ``exit_status`` is a shell's: 128 plus the number of the signal that ended it. The flags say
    which limit it was killed for; ``memory_exceeded`` also that it died of MemoryError. ``duration_s`` is in seconds,
    with the start of the sandbox."""

    stdout: str
    stderr: str
    exit_status: int
    timed_out: bool
    memory_exceeded: bool
    output_exceeded: bool
    files_exceeded: bool
    duration_s: float

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, without an error."""
        return self.exit_status == 0


class SandboxedPythonCoder:
    """Runs Python programs, each in a sandbox of its own that nothing outlives:

        coder = SandboxedPythonCoder()
        coder.setup()
        result = coder.execute("print(input())", stdin="hello", timeout=2.0)

    ``limits`` are for each program; ``timeout``, in seconds, is that of an ``execute`` that names none. What programs
    see is this Python's standard library, read-only, and an empty ``/tmp``: no other file, no process, no network and
    none of this process's environment. Any number of threads may call ``execute``.
    """

    def __init__(self, limits: Limits | None = None, timeout: float = 10.0) -> None:
        self.limits, self.timeout = limits or Limits(), timeout
        self._launcher: Launcher | None = None

    def setup(self) -> None:
        """Make sure that a sandbox can be made here. Raises SandboxError, which says what to do, when it cannot."""
        self._launcher = None
        launcher = Launcher.here(self.limits)
        result = _finish(launcher.start("script", f"print({_READY!r})", 60.0, b""))
        if result.stdout.strip() != _READY:
            raise forbidden(result.stderr)
        self._launcher = launcher

    def recreate(self) -> None:
        """Begin again: what a program did is gone with it anyway, so this looks at the machine again."""
        self.setup()

    def execute(self, code: str, stdin: str | None = None, timeout: float | None = None) -> ExecutionResult:
        """Run ``code`` as a program that reads ``stdin`` (None: nothing).

        An error in ``code`` is in ``stderr`` and ``exit_status``. Raises RuntimeError before ``setup``, and
        SandboxError when there is no sandbox.
        """
        return _finish(self.start("script", code, timeout, (stdin or "").encode(errors="replace")))

    def start(self, mode: Mode, code: str, timeout: float | None = None, stdin: bytes | None = None) -> Process:
        """Start ``code`` and leave the rest to the caller (``Launcher.start``)."""
        if self._launcher is None:
            raise RuntimeError("SandboxedPythonCoder: call setup() first")
        return self._launcher.start(mode, code, self.timeout if timeout is None else timeout, stdin)


def _finish(process: Process) -> ExecutionResult:
    """Follow ``process`` to its end."""
    try:
        watch([process], lambda: process.ended)
    finally:
        process.close()
    kept = process.limits.output_bytes
    stderr = process.stderr[:kept].decode(errors="replace")
    return ExecutionResult(
        stdout=process.stdout[:kept].decode(errors="replace"),
        stderr=stderr,
        exit_status=process.exit_status,
        timed_out=process.excess == "time",
        memory_exceeded=process.excess == "memory" or _died_of_memory(process, stderr),
        output_exceeded=process.excess == "output",
        files_exceeded=process.excess == "files",
        duration_s=time.monotonic() - process.started,
    )


def _died_of_memory(process: Process, stderr: str) -> bool:
    last = stderr.rstrip().rpartition("\n")[2]
    return process.exit_status == 1 and last.startswith("MemoryError")
