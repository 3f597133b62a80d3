"""What a function of untrusted code returns, and whether untrusted code passes a test, found out without trusting it.

Guarantees:
- The code runs in a sandbox that never holds an expected value. What comes out of it are plain values
  (``inside/plain.py``): nothing in them can change how they are compared.
- A test runs in a second sandbox that never holds the code. Only what the test itself says last makes a verdict; code
  that exits, patches Python or writes to its channel can spoil its own answers and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from forge_core.sandbox.coder import SandboxedPythonCoder
from forge_core.sandbox.inside import plain
from forge_core.sandbox.process import Process, watch


class CallFailed(Exception):
    """The code ended, took too long, raised, or gave an answer that is none."""


class Opaque:
    """Stands for a returned object that is not plain; equal to nothing else."""


@dataclass(frozen=True)
class Verdict:
    passed: bool
    reason: str = ""


def call(
    coder: SandboxedPythonCoder,
    code: str,
    function: str,
    arguments: Sequence[Any] = (),
    keywords: dict[str, Any] | None = None,
    timeout: float | None = None,
) -> Any:
    """The value of ``function(*arguments, **keywords)`` as ``code`` defines it; all values are plain.

    ``function`` may be a method, such as ``Solution.add``, of an object made without arguments. ``timeout`` is in
    seconds, for all of ``code``. Raises CallFailed.
    """
    with closing(coder.start("answer", code, timeout)) as process:
        name, *attributes = function.split(".")
        found = _ask(process, {"name": name})["value"]
        for attribute in attributes:
            made = _ask(process, _call(found, [], {}))["value"]
            found = _ask(process, {"object": _number(made), "attribute": attribute})["value"]
        reply = _ask(process, _call(found, arguments, keywords or {}))
        try:
            return plain.decode(reply["value"], lambda number: Opaque())
        except plain.NotPlain as error:
            raise CallFailed(f"the answer is no value: {error}") from None


def judge(coder: SandboxedPythonCoder, code: str, test: str, timeout: float | None = None) -> Verdict:
    """Whether ``test``, Python that uses names that ``code`` defines, runs to its end without an exception.

    ``timeout``: seconds for both together.
    """
    with (
        closing(coder.start("judge", test, timeout)) as judging,
        closing(coder.start("answer", code, timeout)) as asked,
    ):
        both = (judging, asked)
        while True:
            said = _line(judging, both)
            if said is None:
                return Verdict(False, f"the test {_end_of(judging)}")
            with suppress(plain.NotPlain):
                message = plain.loads(said)
                if message == {"passed": True}:
                    return Verdict(True)
                if "failed" in message:
                    return Verdict(False, str(message["failed"]))
            asked.send(said)
            answer = _line(asked, both)
            if answer is None:
                return Verdict(False, f"the code {_end_of(asked)}")
            judging.send(answer)


def _ask(process: Process, question: dict[str, Any]) -> dict[str, Any]:
    process.send(plain.dumps(question))
    line = _line(process, [process])
    if line is None:
        raise CallFailed(f"the code {_end_of(process)}")
    try:
        reply = plain.loads(line)
    except plain.NotPlain as error:
        raise CallFailed(f"the answer is no message: {error}") from None
    if "value" not in reply:
        raise CallFailed(f"the call failed: {reply.get('error')}"[:1000])
    return reply


def _call(found: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    given = plain.encode(list(arguments), _refuse), plain.encode(keywords, _refuse)
    return {"object": _number(found), "arguments": given[0], "keywords": given[1]}


def _refuse(value: Any) -> int:
    raise TypeError(f"an argument of a test is a {type(value).__name__}, which is no plain value")


def _number(value: Any) -> int:
    if not isinstance(value, dict) or "object" not in value:
        raise CallFailed("what the test calls is no function, class or object")
    return value["object"]


def _line(process: Process, watched: Sequence[Process]) -> bytes | None:
    """The next line of ``process``; None when it has ended without one."""
    watch(watched, lambda: b"\n" in process.stdout or process.ended)
    line, separator, rest = process.stdout.partition(b"\n")
    process.stdout[:] = rest
    return bytes(line + separator) if separator else None


def _end_of(process: Process) -> str:
    if process.excess is not None:
        return f"passed its limit of {process.excess}"
    said = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return f"ended with exit status {process.exit_status}: {said[:500]}"
