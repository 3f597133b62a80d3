"""Mathematics with Python: programs run in the sandbox (:mod:`forge_core.sandbox`), each on its own."""

from __future__ import annotations

from functools import lru_cache

from forge_core.environments.tools import ToolEnvironment, ToolError
from forge_core.sandbox import SandboxedPythonCoder

TIMEOUT_S = 10.0


@lru_cache(maxsize=1)
def _coder() -> SandboxedPythonCoder:
    coder = SandboxedPythonCoder(timeout=TIMEOUT_S)
    coder.setup()
    return coder


def python(code: str) -> str:
    """
    Run a Python program and read what it prints. Only the standard library is there; nothing is kept between programs.

    Args:
        code: The program.
    """
    result = _coder().execute(code)
    if result.timed_out:
        raise ToolError(f"the program took more than {TIMEOUT_S:.0f} s")
    if result.memory_exceeded or result.output_exceeded:
        raise ToolError(f"the program used too much {'memory' if result.memory_exceeded else 'output'}")
    if not result.ok:
        raise ToolError(result.stderr.strip().rpartition("\n")[2] or f"exit status {result.exit_status}")
    return result.stdout.rstrip("\n") or "(nothing was printed)"


class PythonTool(ToolEnvironment):
    """Tool ``python``. Making one needs a working sandbox (SandboxError says what is missing)."""

    functions = (python,)

    def __init__(self, error: str = "error: {error}") -> None:
        super().__init__(error)
        _coder()
