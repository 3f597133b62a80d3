"""Validation errors in plain words: the key's path, what is wrong with it, and what would be right."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from forge_core.config.hints import suggestions
from forge_core.config.keys import children, choices, field_at, field_requirement, key_fields, kinds_with, starred
from forge_core.config.left_out import reason_for
from forge_core.config.yaml_text import dump_yaml


def problems_of(error: ValidationError) -> list[str]:
    return [line for detail in error.errors(include_url=False) for line in _explain(detail)]


def unknown_key(path: str, value: Any = None) -> list[str]:
    """The problems of a key that does not exist; a whole unknown section is explained key by key."""
    if reason := reason_for(path):
        return [f"{path}: unknown key: there is none of this meaning: {reason}"]
    found = suggestions(path)
    if isinstance(value, Mapping) and value and not any(set(value) <= set(children(key)) for key in found):
        return [line for name, inner in value.items() for line in unknown_key(f"{path}.{name}", inner)]
    if path in key_fields():  # only a dotted name in a file is both unknown and known
        section, _, leaf = path.partition(".")
        return [f"{path}: dotted keys are for overrides: in a file write {leaf} below {section}:"]
    if found:
        return [f"{path}: unknown key: did you mean {' or '.join(found)}?"]
    return [f"{path}: unknown key: {_keys_nearby(path)}"]


def shown(value: Any) -> str:
    """A value as a message shows it: as the user would write it, cut to a readable length."""
    if isinstance(value, Mapping):
        return "a section" if value else "an empty section"
    text = dump_yaml(value).removesuffix("\n...\n").strip() if not isinstance(value, str) else repr(value)
    text = " ".join(text.split()) if not isinstance(value, list | tuple) else str(list(value))
    return text if len(text) <= 60 else text[:57] + "..."


def _explain(detail: Any) -> list[str]:
    path = ".".join(str(part) for part in detail["loc"] if not str(part).startswith("<"))
    if detail["type"] == "extra_forbidden":
        kinds = [str(part).strip("<>") for part in detail["loc"] if str(part).startswith("<")]
        return _other_kind(path, kinds[-1]) if kinds and kinds_with(path) else unknown_key(path, detail["input"])
    if detail["type"] == "union_tag_invalid":  # a section that is one of several, by a name that none has
        path, detail = f"{path}.name", {**detail, "input": detail["ctx"]["tag"].strip("<>")}
    if detail["type"] == "value_error" and not path:  # a rule across keys names them itself
        return [str(detail["ctx"]["error"])]
    field = field_at(path)
    verb = "is"
    if field is None:  # an element of a list: the key that holds it says what is right
        path, verb = path.rpartition(".")[0], "holds"
        field = key_fields()[starred(path)]
    meaning = f" ({field.description})"
    if detail["type"] == "missing":
        return [f"{path}: is missing: must be {field_requirement(field)}{meaning}"]
    remedy = f"must be {field_requirement(field)}"
    if detail["type"] == "value_error":
        remedy = f"{detail['ctx']['error']}: {remedy}"
    if detail["type"] == "string_pattern_mismatch":
        remedy += meaning
    return [
        f"{path}: {verb} {shown(detail['input'])}: {remedy}{_closest_choice(detail, field.annotation)}{_quote(detail)}"
    ]


def _other_kind(path: str, kind: str) -> list[str]:
    """The problem of a key that belongs to another alternative of its section."""
    parent, _, leaf = path.rpartition(".")
    others = " or ".join(f"{parent}.name={other}" for other in kinds_with(path))
    return [f"{path}: {parent}.name={kind} has no key {leaf}: remove it, or set {others}"]


def _closest_choice(detail: Any, annotation: Any) -> str:
    close = get_close_matches(str(detail["input"]), choices(annotation), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _quote(detail: Any) -> str:
    given = detail["input"]
    plain = isinstance(given, int | float)
    return f'; write it in quotes: "{shown(given)}"' if detail["type"] == "string_type" and plain else ""


def _keys_nearby(path: str) -> str:
    parent = path.rpartition(".")[0]
    while parent and not children(parent):
        parent = parent.rpartition(".")[0]
    place = f"below {parent}" if parent else "at the top"
    return f"the keys {place} are {', '.join(children(parent))}"
