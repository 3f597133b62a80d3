"""Tests of code, as data sets give them, and what counts as the right answer.

A prompt's tests are a list (or its JSON) of

- ``{"stdin": text, "stdout": text}`` (also ``input``/``output``): a program that reads and writes;
- ``{"function": name, "args": [...], "kwargs": {...}, "returns": value}``: one call; ``Class.method`` makes an object;
- ``{"assert": code}`` or a text: Python that uses the functions of the code, such as ``assert add(1, 2) == 3``;

or ``{"inputs": [...], "outputs": [...]}``, with ``fn_name`` for calls; or one text of Python. A test that defines
``check(candidate)`` is called with the function that ``metadata["entry_point"]`` names.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

RELATIVE, ABSOLUTE = 1e-6, 1e-9  # how far a float may be off


@dataclass(frozen=True)
class ProgramCase:
    stdin: str
    stdout: str


@dataclass(frozen=True)
class CallCase:
    function: str
    arguments: list[Any]
    returns: Any
    keywords: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TestCase:
    """``test`` passes when it runs to its end."""

    __test__ = False  # for pytest: not a test of ours
    test: str


Case = ProgramCase | CallCase | TestCase


def cases(metadata: dict[str, Any], column: str) -> list[Case]:
    """The tests in ``metadata[column]``, or in its ``answer``. Raises KeyError and ValueError that name the column."""
    given = metadata.get(column) or metadata.get("answer")
    if not given:
        raise KeyError(f"the prompt has no tests: neither the column {column!r} nor the answer holds any")
    if isinstance(given, str):
        given = _parsed(given)
    if isinstance(given, dict) and "inputs" in given:
        given = _pairs(given)
    found = [_case(one, metadata, column) for one in (given if isinstance(given, list) else [given])]
    if not found:
        raise ValueError(f"the tests in {column!r} are an empty list")
    return found


def same_value(found: Any, expected: Any) -> bool:
    """Whether ``found`` is what JSON writes as ``expected``: a tuple is a list, keys are text, floats are rounded."""
    try:
        return _same(found, expected)
    except (ArithmeticError, ValueError):  # too large to be compared with a float, or to be a key of JSON
        return False


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(found, int | float):
        return _close(found, expected)
    if isinstance(expected, list | tuple):
        alike = isinstance(found, list | tuple) and len(found) == len(expected)
        return alike and all(map(_same, found, expected))
    if isinstance(expected, dict):
        known = {_key(key): value for key, value in found.items()} if isinstance(found, dict) else {}
        wanted = {_key(key): value for key, value in expected.items()}
        alike = isinstance(found, dict) and known.keys() == wanted.keys()
        return alike and all(_same(known[key], value) for key, value in wanted.items())
    return bool(isinstance(found, bool) == isinstance(expected, bool) and found == expected)


def same_output(found: str, expected: str) -> bool:
    """Whether the lines are the same but for white space at their ends, and floats but for rounding."""
    ours, theirs = (_lines(text) for text in (found, expected))
    return ours == theirs or (len(ours) == len(theirs) and all(map(_same_words, ours, theirs)))


def _parsed(text: str) -> Any:
    """JSON if it is a list or an object, else a test in Python."""
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def _pairs(given: dict[str, Any]) -> list[dict[str, Any]]:
    pairs = zip(given["inputs"], given["outputs"], strict=True)
    if name := given.get("fn_name"):
        return [{"function": name, "args": arguments, "returns": value} for arguments, value in pairs]
    return [{"stdin": stdin, "stdout": stdout} for stdin, stdout in pairs]


def _case(one: Any, metadata: dict[str, Any], column: str) -> Case:
    if isinstance(one, str):
        return TestCase(_with_check(one, metadata))
    keys = set(one) if isinstance(one, dict) else set()
    if {"stdin", "stdout"} <= keys:
        return ProgramCase(_text(one["stdin"]), _text(one["stdout"]))
    if {"input", "output"} <= keys:
        return ProgramCase(_text(one["input"]), _text(one["output"]))
    if {"function", "returns"} <= keys:
        return CallCase(one["function"], list(one.get("args") or []), one["returns"], dict(one.get("kwargs") or {}))
    if "assert" in keys:
        return TestCase(_with_check(one["assert"], metadata))
    raise ValueError(
        f"a test in {column!r} has the keys {sorted(keys)}: use stdin and stdout, function, args and returns, or assert"
    )


def _with_check(test: str, metadata: dict[str, Any]) -> str:
    name = metadata.get("entry_point")
    defines = re.search(r"^def check\(", test, flags=re.MULTILINE)
    return f"{test}\n\ncheck({name})\n" if name and defines else test


def _text(value: Any) -> str:
    """Some data sets give the lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_words(found: str, expected: str) -> bool:
    ours, theirs = found.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    if not re.fullmatch(r"[+-]?\d*\.\d+(e[+-]?\d+)?", expected, re.IGNORECASE):  # whole numbers are exact
        return False
    try:
        return _close(float(found), float(expected))
    except ValueError:
        return False


def _close(found: float, expected: float) -> bool:
    return found == expected or math.isclose(found, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(key, default=repr)
