"""From the path of a reward in a configuration to the function that grades.

Guarantees:
- A path is a built-in name, ``<module>:<name>`` or ``<file.py>:<name>``; nothing is evaluated.
- ``source_digest`` changes when the file that defines the reward does.
- Every failure is a RewardError that names the path and the original error.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from forge_core.data.importing import ObjectPathError, load_object, source_file
from forge_core.redaction import redact
from forge_core.rewards.grading import Grade, Spec

BUILTINS = {
    "exact_match": "forge_core.rewards.builtin:ExactMatch",
    "last_integer": "forge_core.rewards.builtin:LastInteger",
    "overlong": "forge_core.rewards.builtin:Overlong",
    "reasoning_gym": "forge_core.rewards.builtin:ReasoningGym",
}


class RewardError(ValueError):
    """A reward cannot be used. The message names its path and says what to do."""


def resolve(path: str, folder: Path | None = None) -> Callable[..., Any]:
    """The function or class that ``path`` names; files are looked for in the working directory, then ``folder``."""
    try:
        found = load_object(full_path(path), folder)
    except ObjectPathError as error:
        raise RewardError(f"rewards.functions: {error}") from error
    if not callable(found):
        raise RewardError(f"rewards.functions: {path} is a {type(found).__name__}, not a function or class")
    return found


def source_digest(path: str, folder: Path | None = None) -> str:
    """SHA-256 (hex) of the source file that ``path`` names."""
    try:
        return hashlib.sha256(source_file(full_path(path), folder).read_bytes()).hexdigest()
    except ObjectPathError as error:
        raise RewardError(f"rewards.functions: {error}") from error


def needs_answer(path: str) -> bool:
    """Whether ``path`` is a built-in reward that compares with the ground truth (of others it is not known)."""
    return path in BUILTINS and resolve(path).needs_answer  # type: ignore[attr-defined]


def build(spec: Spec) -> Grade:
    """The grading function of ``spec``: of an instance made with its options, or the function with them bound."""
    found = resolve(spec.path, spec.folder)
    if not inspect.isclass(found):
        _check_call(found, spec, spec.options)
        return partial(found, **spec.options) if spec.options else found
    try:
        instance = found(**spec.options)
    except Exception as error:  # the constructor is the user's code
        raise RewardError(
            redact(
                f"rewards.functions: making {spec.path} with the options {spec.options} failed: "
                f"{type(error).__name__}: {error}"
            )
        ) from error
    grade = getattr(instance, "grade", None)
    if not callable(grade):
        raise RewardError(f"rewards.functions: {spec.path} has no method grade(prompt, completion, metadata)")
    _check_call(grade, spec, {})
    return grade


def _check_call(grade: Grade, spec: Spec, options: dict[str, Any]) -> None:
    """Make sure that ``grade`` can be called with the three arguments and ``options``."""
    try:
        inspect.signature(grade).bind("prompt", "completion", {}, **options)
    except TypeError as error:
        raise RewardError(
            redact(
                f"rewards.functions: {spec.path} cannot be called as (prompt, completion, metadata) with the options "
                f"{options}: {error}"
            )
        ) from error


def full_path(path: str) -> str:
    """``path`` with a built-in name replaced by where it is defined."""
    if ":" in path:
        return path
    if path not in BUILTINS:
        close = difflib.get_close_matches(path, BUILTINS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise RewardError(
            f"rewards.functions: there is no reward {path!r}; {hint}built-in are {', '.join(BUILTINS)}; your own is "
            "<module>:<name> or <file.py>:<name>"
        )
    return BUILTINS[path]
