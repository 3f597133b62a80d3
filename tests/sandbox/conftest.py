"""One coder for all tests, and what the host can see of a sandbox that has been."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_core.sandbox import ExecutionResult, Limits, SandboxedPythonCoder

WHERE = "import os; print('namespace', os.readlink('/proc/self/ns/pid'), flush=True)\n"
SMALL = Limits(memory_mb=128, processes=16, file_mb=4, disk_mb=16, files=512)


@pytest.fixture(scope="session")
def coder() -> SandboxedPythonCoder:
    coder = SandboxedPythonCoder(SMALL, timeout=10.0)
    coder.setup()
    return coder


class Attacker:
    """Runs attacks; each must be over in ``timeout`` and a little, and have left no process."""

    def __init__(self, coder: SandboxedPythonCoder) -> None:
        self._coder = coder

    def __call__(self, code: str, timeout: float = 10.0, stdin: str | None = None) -> ExecutionResult:
        before = time.monotonic()
        result = self._coder.execute(WHERE + code, stdin, timeout)
        assert time.monotonic() - before < timeout + 3.0
        said, _, rest = result.stdout.partition("\n")
        assert said.startswith("namespace pid:["), result
        assert processes_of(said.removeprefix("namespace ")) == []
        return ExecutionResult(**{**vars(result), "stdout": rest})


@pytest.fixture
def attack(coder: SandboxedPythonCoder) -> Iterator[Attacker]:
    """Runs an attack; nothing of this process is changed by it."""
    before = set(os.listdir("/proc/self/fd"))
    yield Attacker(coder)
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # that of the listing itself


def processes_of(namespace: str) -> list[str]:
    """Processes of this machine in a namespace, such as ``pid:[4026532256]``."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and os.readlink(process / "ns/pid") == namespace:
                found.append(process.name)
        except OSError:  # it has just ended
            continue
    return found
