"""From the path of a reward in a configuration to the function that grades.

A built-in reward is a class whose options are its arguments, with ``grade(prompt, completion, metadata)``, or with
``grade_many`` (``BatchReward``) where it grades many items at once; then ``timeout_s`` is an argument too.
``needs_answer``: it compares with the ground truth. ``can_hang``: it runs in a grading process, which can be killed.
A class may have a static ``check(**options)``, where making it would load something large; ``decide_nothing``, options
that change no grade; and a static ``identity(options)``, what decides its grades besides.

Guarantees:
- A path is a built-in name, ``<module>:<name>`` or ``<file.py>:<name>``; nothing is evaluated.
- ``source_digest`` changes when the file that defines the reward does; that of a built-in one also when a file of
  this package does that it imports.
- Every failure is a RewardError that names the path and the original error.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

from forge_core.data.importing import ObjectPathError, load_object, misfit, mistyped, source_file
from forge_core.redaction import redact
from forge_core.rewards.grading import BatchReward, Grade, Spec

BUILTINS = {
    "exact_match": "forge_core.rewards.exact_match:ExactMatch",
    "f1": "forge_core.rewards.f1:F1",
    "last_integer": "forge_core.rewards.last_integer:LastInteger",
    "math": "forge_core.rewards.math:MathReward",
    "reasoning_gym": "forge_core.rewards.reasoning_gym:ReasoningGym",
    "code": "forge_core.rewards.code:CodeReward",
    "environment": "forge_core.rewards.environment:EnvironmentReward",
    "thinking": "forge_core.rewards.thinking:ThinkingReward",
    "format": "forge_core.rewards.format:FormatReward",
    "regex": "forge_core.rewards.regex:RegexReward",
    "language": "forge_core.rewards.language:LanguageReward",
    "length": "forge_core.rewards.length:LengthReward",
    "overlong": "forge_core.rewards.overlong:Overlong",
    "llm_judge": "forge_core.rewards.llm_judge:LLMJudge",
    "reward_model": "forge_core.rewards.reward_model:RewardModel",
    "ensemble": "forge_core.rewards.ensemble:Ensemble",
}


_HELPER = re.compile(r"^ *from forge_core\.rewards\.(\w+) import", re.MULTILINE)
_PLAIN_METHODS = (FunctionType, staticmethod, classmethod)  # to bind one runs nothing of the user's
_MACHINERY = frozenset({"actor", "grading", "pool", "resolve", "wire", "worker"})  # decides no grade


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
        file = source_file(full_path(path), folder)
    except ObjectPathError as error:
        raise RewardError(f"rewards.functions: {error}") from error
    files = sorted(_with_helpers(file)) if path in BUILTINS else [file]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _with_helpers(file: Path) -> set[Path]:
    """``file`` and those beside it that it imports to grade."""
    found, waiting = set(), [file]
    while waiting:
        found.add(file := waiting.pop())
        names = set(_HELPER.findall(file.read_text())) - _MACHINERY
        waiting += [helper for name in names if (helper := file.with_name(f"{name}.py")) not in found]
    return found


def needs_answer(path: str) -> bool:
    """Whether ``path`` is a built-in reward that compares with the ground truth (of others it is not known)."""
    return path in BUILTINS and resolve(path).needs_answer  # type: ignore[attr-defined]


def is_batch(path: str) -> bool:
    """Whether ``path`` is a built-in reward that grades many items at once."""
    return path in BUILTINS and hasattr(resolve(path), "grade_many")


def can_hang(path: str) -> bool:
    """Whether ``path`` is code of the user, or a built-in reward that may not come to an end."""
    return path not in BUILTINS or getattr(resolve(path), "can_hang", False)


def build(spec: Spec) -> Grade:
    """The grading function of ``spec``: of an instance made with its options, or the function with them bound."""
    found = resolve(spec.path, spec.folder)
    if not inspect.isclass(found):
        _check_call(found, spec, spec.options)
        return partial(found, **spec.options) if spec.options else found
    grade = getattr(_made(found, spec), "grade", None)
    if not callable(grade):
        raise RewardError(_without_grade(spec))
    _check_call(grade, spec, {})
    return grade


def build_batch(spec: Spec) -> BatchReward:
    """The built-in reward of ``spec``, which ``is_batch``: it keeps its timeout itself."""
    return _made(partial(resolve(spec.path), timeout_s=spec.timeout_s), spec)


def check_built_in(spec: Spec) -> None:
    """Raise RewardError for options of a built-in reward that cannot be, or that need what this machine lacks."""
    found = resolve(spec.path)
    _made(getattr(found, "check", found), spec)


def check_own(spec: Spec) -> None:
    """Raise RewardError for a reward of the user's own that ``build`` would refuse for its signatures: none of its code
    is called, only its file imported."""
    found = resolve(spec.path, spec.folder)
    if not inspect.isclass(found):
        _check_call(found, spec, spec.options)
        return _check_types(found, spec)
    _check_constructor(found, spec)
    grade = inspect.getattr_static(found, "grade", None)
    if isinstance(grade, _PLAIN_METHODS):
        return _check_call(grade.__get__(object(), found), spec, {})
    if not (callable(grade) or hasattr(grade, "__get__") or _may_get_grade(found)):
        raise RewardError(_without_grade(spec))
    return None


def _check_constructor(found: type, spec: Spec) -> None:
    """Make sure that ``found`` can be called with the options."""
    if error := misfit(found, **spec.options):
        parameters = inspect.signature(found).parameters
        raise RewardError(
            f"rewards.functions: {spec.path} cannot be made with the options {', '.join(spec.options) or '(none)'}: "
            f"{error}; its options are {', '.join(parameters) or '(none)'}"
        ) from error
    _check_types(found, spec)


def _check_types(found: Any, spec: Spec) -> None:
    if wrong := mistyped(found, spec.options):
        raise RewardError(f"rewards.functions: the options of {spec.path}: {wrong}: set it below options:")


def _may_get_grade(found: type) -> bool:
    """Whether an instance may have a ``grade`` that its class has not: set by a constructor, or looked up."""
    if inspect.getattr_static(found, "__getattr__", None) is not None:
        return True
    constructors = [vars(base).get("__init__") for base in found.__mro__]
    return any("grade" in code.co_names for c in constructors if (code := getattr(c, "__code__", None)))


def _without_grade(spec: Spec) -> str:
    return f"rewards.functions: {spec.path} has no method grade(prompt, completion, metadata)"


def _made(found: Callable[..., Any], spec: Spec) -> Any:
    try:
        return found(**spec.options)
    except Exception as error:  # the constructor is the user's code
        shown = {k: v for k, v in spec.options.items() if not k.endswith("_env")}  # there a key may stand by mistake
        raise RewardError(
            redact(
                f"rewards.functions: making {spec.path} with the options {shown} failed: "
                f"{type(error).__name__}: {error}"
            )
        ) from error


def _check_call(grade: Grade, spec: Spec, options: dict[str, Any]) -> None:
    """Make sure that ``grade`` can be called with the three arguments and ``options``."""
    if error := misfit(grade, "prompt", "completion", {}, **options):
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
