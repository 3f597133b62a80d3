r"""References to environment variables in configuration values: ``${oc.env:NAME}`` and ``${oc.env:NAME,default}``.

Guarantees: a missing variable without a default is a problem that names key and variable; any other ``${`` is a
problem too (nothing is left half-resolved); ``\${`` stands for the text ``${``, and ``escape`` writes it that way.
Values come back in new containers, so nothing the caller passed in is shared or changed.

Secrets: a configuration is stored, printed and handed to Prefect, so it never holds one. A text with a reference to a
variable that holds a secret stays as it is, and is only allowed in the ``options`` of the user's own code, which get
the value when they are used (``revealed``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from forge_core.config.errors import ConfigError
from forge_core.redaction import has_password, is_key_name, is_secret_name

_PLACES = "options of rewards, loss, environment and data sets"
_OPTIONS = re.compile(
    r"(rewards\.functions\.\d+(\.verifiers\.\d+)?|loss|environment|dataset(\.mixture\.\d+)*|warm_start\.dataset)\.options\..+"
)
_SECRET_OPTION = re.compile(
    r"(^|_)(api_?key|secret(_key)?|access_key|private_key|password|passwd|passphrase|credentials?|"
    r"(auth|access|api|bearer|hf)_token)$",
    re.IGNORECASE,
)
_OPENING = re.compile(r"(\\*)\$\{")
_REFERENCE = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_][A-Za-z0-9_]*)\s*(?:,([^{}]*))?\}")


def resolve_references(value: Any, key: str, problems: list[str]) -> Any:
    """``value`` with its references replaced; what could not be replaced is appended to ``problems``."""
    if isinstance(value, Mapping):
        return {str(k): resolve_references(v, f"{key}.{k}" if key else str(k), problems) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [resolve_references(v, f"{key}.{i}", problems) for i, v in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    if has_secret(value):
        _resolve_text(value, key, problems)  # a missing variable is a problem now
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole and (whole[2] or "").strip() in ("null", "None") and whole[1] not in os.environ:
        return None  # a default of null is null, not the text "null"
    return _resolve_text(value, key, problems)


def has_secret(text: str) -> bool:
    """Whether ``text`` refers to a variable that holds a secret."""
    found = (match[1] for match in _REFERENCE.finditer(text))
    return any(is_secret_name(name) or has_password(os.environ.get(name, "")) for name in found)


def revealed(options: Mapping[str, Any], key: str) -> dict[str, Any]:
    """``options`` with the secrets that they refer to, for the code that they are the arguments of. Raises ConfigError
    for a variable that is not set."""
    problems: list[str] = []
    found: dict[str, Any] = _revealed(dict(options), key, problems)
    if problems:
        raise ConfigError(problems)
    return found


def _revealed(value: Any, key: str, problems: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {k: _revealed(v, f"{key}.{k}", problems) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_revealed(v, f"{key}.{i}", problems) for i, v in enumerate(value)]
    return _resolve_text(value, key, problems) if isinstance(value, str) and has_secret(value) else value


def secret_problems(value: Any, key: str = "") -> list[str]:
    """The secrets in a configuration, and the references to one where none may be."""
    if isinstance(value, Mapping | list):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        return [p for k, v in pairs for p in secret_problems(v, f"{key}.{k}" if key else str(k))]
    if not isinstance(value, str):
        return []
    if has_secret(value):
        return [] if _OPTIONS.fullmatch(key) else [f"{key}: a secret can stand in {_PLACES} only, not here"]
    leaf = key.rpartition(".")[2]
    if leaf == "api_key_env" and not is_key_name(value):
        return [f"{key}: must be the name of an environment variable that ends in _API_KEY, not the key"]
    if has_password(value) or (_OPTIONS.fullmatch(key) and value and _SECRET_OPTION.search(leaf)):
        return [
            f"{key}: holds a secret, which would be stored with the run: put it into an environment variable and write "
            f"${{oc.env:NAME}} here, with a NAME that ends in _KEY, _TOKEN, _PASSWORD or _SECRET"
        ]
    return []


def escape(value: Any) -> Any:
    r"""The opposite of ``resolve_references``: every ``${`` as ``\${``, in new containers."""
    if isinstance(value, Mapping):
        return {k: escape(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [escape(v) for v in value]
    if not isinstance(value, str) or has_secret(value):
        return value
    return _OPENING.sub(lambda m: m[1] * 2 + r"\${", value)


def _resolve_text(text: str, key: str, problems: list[str]) -> str:
    done, position = "", 0
    while opening := _OPENING.search(text, position):
        slashes = len(opening[1])
        done += text[position : opening.start()] + "\\" * (slashes // 2)
        if slashes % 2:
            done, position = done + "${", opening.end()
            continue
        start = opening.start() + slashes
        reference = _REFERENCE.match(text, start)
        if reference is None:
            problems.append(
                f"{key}: {text[start:]!r} is no reference: only ${{oc.env:NAME}} and ${{oc.env:NAME,default}} are; "
                r"for the text itself write \${"
            )
            return text
        done, position = done + _variable(reference, key, problems), reference.end()
    return done + text[position:]


def _variable(reference: re.Match[str], key: str, problems: list[str]) -> str:
    name, default = reference[1], reference[2]
    if name in os.environ:
        return os.environ[name]
    if default is None:
        problems.append(
            f"{key}: the environment variable {name} is not set: set it, or give a default: ${{oc.env:{name},default}}"
        )
        return ""
    return default.strip()
