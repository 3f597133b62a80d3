"""Real ``forge`` processes on a temporary store: started, killed, stopped and looked after.

Each process carries a tag in its environment, which everything that it starts inherits: so what outlives it is found.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.fixtures_prefect import with_tables

ROOT = Path(__file__).resolve().parents[2]
FORGE = Path(sys.executable).with_name("forge")
TAG = "FORGE_TEST_TAG"
START_S = 180.0  # imports and the Prefect server, on a slow machine that does other things too


def write_config(folder: Path, values: dict[str, Any]) -> Path:
    """``values`` as the configuration file of a run whose store is ``folder / "store"``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values | {"store": str(folder / "store")}, allow_unicode=True))
    return path


class Forge:
    """``forge ARGUMENTS`` in ``folder``, in a session and process group of its own."""

    def __init__(
        self, folder: Path, *arguments: object, own_server: bool = False, environment: Mapping[str, str] | None = None
    ) -> None:
        self.tag = uuid.uuid4().hex
        self.started = time.monotonic()
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        code = {"PYTHONPATH": path, "FORGE_CODE_PATH": f"{ROOT}{os.pathsep}{folder}"}
        variables = {**os.environ, **code, TAG: self.tag, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
        if own_server:  # a child of the run, in a Forge home that no other run uses
            variables |= {"FORGE_HOME": str(with_tables(folder / "home"))}
            variables.pop("PREFECT_API_URL", None)
        self._log = folder / f"{arguments[0]}-{self.tag[:6]}.log"
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [FORGE, *map(str, arguments)],
                cwd=folder,
                env={**variables, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return self._log.read_text(errors="replace")

    def wait(self, timeout_s: float = START_S) -> int:
        """The exit status. Raises TimeoutError with the output when there is none in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still running after {timeout_s:.0f} s:\n{self.output}") from None

    def wait_until(self, condition: Callable[[], Any], timeout_s: float = START_S, poll_s: float = 0.01) -> Any:
        """Wait for a true value, which is returned. Raises AssertionError when the process ends before."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert self.process.poll() is None, f"ended with status {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < deadline, f"nothing within {timeout_s:.0f} s:\n{self.output}"
            time.sleep(poll_s)
        return value

    def printed(self, pattern: str) -> re.Match[str] | None:
        return re.search(pattern, self.output)

    def signal_group(self, number: int) -> None:
        """As a terminal does: the signal goes to every process of the group."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """``kill -9`` of the process group."""
        self.signal_group(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """Clean up after a failed test."""
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def left(self) -> list[int]:
        """Processes that this one started, directly or not, and itself, as far as they live."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _carries(pid, self.tag)]

    def orphans(self, timeout_s: float = 5.0) -> list[str]:
        """What still lives after the process ended, having had ``timeout_s`` seconds to go: command lines."""
        deadline = time.monotonic() + timeout_s
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in left]


def _carries(pid: int, tag: str) -> bool:
    try:
        return f"{TAG}={tag}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # ended meanwhile, or another user's
        return False
