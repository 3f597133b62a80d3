"""Starting sandboxes: one Python program each."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Literal

from forge_core.sandbox import bubblewrap, seccomp
from forge_core.sandbox.image import image, mark_used
from forge_core.sandbox.limits import Limits
from forge_core.sandbox.process import Process

Mode = Literal["script", "answer", "judge"]
"""How the program is run: as a script; as a module whose functions are called (``inside/answer.py``); as a test that
calls them (``inside/judge.py``)."""


@dataclass(frozen=True)
class Launcher:
    bwrap: str
    image: Path
    limits: Limits

    @classmethod
    def here(cls, limits: Limits) -> Launcher:
        """For this machine. Raises SandboxError when bubblewrap or the image cannot be had."""
        seccomp.program()
        return cls(bubblewrap.executable(), image(), limits)

    def start(self, mode: Mode, code: str, timeout_s: float, stdin: bytes | None = None) -> Process:
        """Start ``code``, with ``timeout_s`` seconds from now; ``stdin`` None: a pipe for ``Process.send``."""
        mark_used(self.image)
        status, reports = os.pipe()
        files = [_file(seccomp.program()), _file(code.encode(errors="replace"))]
        source = None if stdin is None else _file(stdin)
        kept = self.limits.for_processes(cpu_s=ceil(timeout_s) + 1)
        user, options = bubblewrap.identity()
        arguments = [mode, *(f"{name}={value}" for name, value in kept.items())]
        try:
            bwrap = subprocess.Popen(
                [*user, *bubblewrap.command(self.bwrap, self.image, self.limits, reports, *files), *arguments],
                stdin=subprocess.PIPE if source is None else source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                cwd="/",
                pass_fds=[reports, *files],
                start_new_session=True,
                **options,
            )
        except BaseException:
            os.close(status)
            raise
        finally:
            for fd in (reports, *files, *([] if source is None else [source])):
                os.close(fd)
        return Process(bwrap, os.fdopen(status), self.image, self.limits, timeout_s)


def _file(data: bytes) -> int:
    """A file in memory that holds ``data``, to be read from its beginning."""
    fd = os.memfd_create("forge")
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
