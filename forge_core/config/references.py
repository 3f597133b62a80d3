r"""References to environment variables in configuration values: ``${oc.env:NAME}`` and ``${oc.env:NAME,default}``.

Guarantees: a missing variable without a default is a problem that names key and variable; any other ``${`` is a
problem too (nothing is left half-resolved); ``\${`` stands for the text ``${``, and ``escape`` writes it that way.
Values come back in new containers, so nothing the caller passed in is shared or changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

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
    whole = _REFERENCE.fullmatch(value)
    if whole and (whole[2] or "").strip() in ("null", "None") and whole[1] not in os.environ:
        return None  # a default of null is null, not the text "null"
    return _resolve_text(value, key, problems)


def escape(value: Any) -> Any:
    r"""The opposite of ``resolve_references``: every ``${`` as ``\${``, in new containers."""
    if isinstance(value, Mapping):
        return {k: escape(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [escape(v) for v in value]
    if not isinstance(value, str):
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
