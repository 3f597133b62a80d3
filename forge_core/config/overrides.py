"""Overrides of single keys: ``a.b=c`` sets, ``~a.b`` removes, in the order given.

Guarantees: a value is YAML (``[1, 2]``, ``null`` and ``None`` work; it may hold ``=``), but a key that only takes text
takes the value as typed; a missing section is made, a text is never turned into a section; ``~`` on a key that the
configuration does not set is a problem; a flag (``--trainer.procs 4``) is answered with the override to type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from forge_core.config.explain import shown
from forge_core.config.hints import suggestions
from forge_core.config.keys import is_text_only, key_fields
from forge_core.config.references import resolve_references
from forge_core.config.yaml_text import load_yaml, yaml_mistake

Overrides = Sequence[str] | Mapping[str, Any]


def apply_overrides(tree: dict[str, Any], overrides: Overrides, problems: list[str]) -> None:
    """Change ``tree`` in place; what cannot be applied is appended to ``problems``.

    A mapping (dotted key to value, as a flow gets it) holds values that are typed already.
    """
    if isinstance(overrides, str):
        raise TypeError("overrides must be a list of 'key=value' texts or a mapping, not one text")
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            _apply(tree, key, value, problems)
        return
    for text in _answer_flags(overrides, problems):
        key, equals, value = text.partition("=")
        if text.startswith("~"):
            _apply(tree, text, None, problems)
        elif not equals or not key.strip():
            problems.append(f"{text}: is no override: write key=value, or ~key to remove a key")
        else:
            _apply(tree, key.strip(), _typed(key.strip(), value.strip(), problems), problems)


def _answer_flags(words: Sequence[str], problems: list[str]) -> list[str]:
    """The overrides without flags. A flag becomes a problem together with the next lone word, wherever that stands:
    a command line parser may have moved it."""
    flags = [word for word in words if word.startswith("-")]
    lone = [word for word in words if not word.startswith(("-", "~")) and "=" not in word]
    for word in flags:
        flag, equals, value = word.partition("=")
        problems.append(_flag_answer(flag, value if equals or not lone else lone.pop(0)))
    return [word for word in words if word in lone or (not word.startswith("-") and (word[:1] == "~" or "=" in word))]


def _flag_answer(flag: str, value: str) -> str:
    name = flag.lstrip("-").replace("-", "_")
    keys = [name] if name in key_fields() else suggestions(name)
    given = f"{flag} {value}".strip()
    if not keys:
        return f"{given}: no key is called {name}, and keys are set without dashes: key=value"
    return f"{given}: keys are set without dashes: type {keys[0]}={value or '...'}"


def _typed(key: str, text: str, problems: list[str]) -> Any:
    if is_text_only(key) and text[:1] not in ("'", '"') and text not in ("null", "None", "~", ""):
        return text
    try:
        value, found = load_yaml(text)
    except yaml.YAMLError as error:
        problems.append(f"{key}: the value {text!r} is no YAML ({yaml_mistake(error)}): put it in quotes")
        return None
    problems += [f"{key}.{problem}" for problem in found]
    return value


def _apply(tree: dict[str, Any], key: str, value: Any, problems: list[str]) -> None:
    remove = key.startswith("~")
    path = key.removeprefix("~").strip()
    value = resolve_references(value, path, problems)
    holder: Any = tree
    parts = path.split(".")
    for depth, part in enumerate(parts[:-1]):
        inner = _get(holder, part)
        if inner is None and isinstance(holder, dict) and not remove and not parts[depth + 1].isdigit():
            inner = holder[part] = {}
        if not isinstance(inner, dict | list):
            problems.append(_not_there(path, ".".join(parts[: depth + 1]), inner, remove))
            return
        holder = inner
    _change(holder, parts[-1], path, value, remove, problems)


def _change(holder: Any, name: str, path: str, value: Any, remove: bool, problems: list[str]) -> None:
    place: Any = name
    if isinstance(holder, list):
        if not name.isdigit() or int(name) >= len(holder):
            problems.append(f"{path}: the list has {len(holder)} elements: use a number from 0 to {len(holder) - 1}")
            return
        place = int(name)
    if not remove:
        holder[place] = value
    elif isinstance(holder, dict) and name not in holder:
        problems.append(_not_there(path, path, None, remove))
    else:
        del holder[place]


def _get(holder: Any, part: str) -> Any:
    if isinstance(holder, list):
        return holder[int(part)] if part.isdigit() and int(part) < len(holder) else None
    return holder.get(part)


def _not_there(path: str, place: str, inner: Any, remove: bool) -> str:
    if inner is not None:
        return f"{path}: cannot be set below {place}, which is {shown(inner)}: set {place} itself"
    if not remove:
        return f"{path}: the configuration has no {place}: set the whole list, {place.rstrip('.0123456789')}='[...]'"
    if path in key_fields():
        return f"~{path}: the configuration does not set this key, so there is nothing to remove: leave ~{path} out"
    hint = "".join(f": did you mean ~{key}?" for key in suggestions(path)[:1])
    return f"~{path}: there is no such key to remove{hint}"
