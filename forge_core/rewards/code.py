"""The reward of code: the share of a prompt's tests that it passes, each in a sandbox of its own.

Guarantees:
- Nothing that a test expects is ever where the code runs: outputs and returned values are compared in this process,
  and asserts are made in a second sandbox (``forge_core/sandbox/asking.py``). So code cannot look the answer up, and
  exiting early, patching Python or writing to the channel of the verdict earns nothing.
- Code that hangs, crashes or uses too much fails the test and costs its time; a sandbox that cannot be had is an
  error, never a 0.
- Without bubblewrap the reward cannot be made, so a run that uses it does not start.

What it cannot see: code that knows the tests because the prompt shows them. Keep the tests that count out of prompts.
"""

from __future__ import annotations

import re
import textwrap
import time
from typing import Any

from forge_core.rewards.code_cases import CallCase, Case, ProgramCase, cases, same_output, same_value
from forge_core.sandbox import Limits, SandboxedPythonCoder
from forge_core.sandbox.asking import CallFailed, call, judge

_FENCE = re.compile(r"[ \t]*```[ \t]*([^`\n]*)")
_PYTHON = frozenset({"python", "python3", "py"})


class CodeReward:
    """The share of the tests in ``metadata[tests]`` (else in its answer) that the last fenced block of Python in the
    completion passes; 0 without a block. ``partial_credit=False``: 1 when it passes all, else 0.

    ``test_timeout_s`` seconds for each test, ``total_s`` for all of one completion: tests that have not begun by then
    have failed. ``memory_mb`` is for each test, in MiB.
    """

    needs_answer = False  # the tests may be a column of their own
    can_hang = True  # graded in processes of their own: many at once, and forking them is quick

    def __init__(
        self,
        tests: str = "tests",
        partial_credit: bool = True,
        test_timeout_s: float = 4.0,
        total_s: float = 20.0,
        memory_mb: int = 512,
    ):
        self.tests, self.partial_credit, self.total_s = tests, partial_credit, total_s
        self._coder = SandboxedPythonCoder(Limits(memory_mb=memory_mb), test_timeout_s)
        self._coder.setup()

    def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
        tests = cases(metadata, self.tests)
        code = last_block(completion)
        if code is None:
            return 0.0
        deadline = time.monotonic() + self.total_s
        passed = sum(self._passes(code, case, deadline) for case in tests)
        return passed / len(tests) if self.partial_credit else float(passed == len(tests))

    def _passes(self, code: str, case: Case, deadline: float) -> bool:
        if time.monotonic() > deadline:
            return False
        if isinstance(case, ProgramCase):
            result = self._coder.execute(code, case.stdin)
            return result.ok and same_output(result.stdout, case.stdout)
        if isinstance(case, CallCase):
            try:
                return same_value(call(self._coder, code, case.function, case.arguments, case.keywords), case.returns)
            except CallFailed:
                return False
        return judge(self._coder, code, case.test).passed


def last_block(completion: str) -> str | None:
    """The text of the last closed fenced block that says it is Python; where none does, of the last that says no
    language (what a program prints often stands in one too)."""
    found: dict[bool, str] = {}
    language: str | None = None
    lines: list[str] = []
    for line in completion.splitlines(keepends=True):
        fence = _FENCE.fullmatch(line.rstrip())
        if fence and language is None:
            language, lines = (fence[1].lower().split() or [""])[0], []
        elif fence and not fence[1]:
            if language in _PYTHON or not language:
                found[language in _PYTHON] = textwrap.dedent("".join(lines))
            language = None
        else:
            lines.append(line)
    return found.get(True, found.get(False))
