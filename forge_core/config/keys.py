"""What keys there are, read from the models: their paths, what each accepts in plain words, and the key reference.

A path is dotted; the elements of a list are ``*`` (``rewards.functions.*.path``). Where a section is one of several,
told apart by its ``name`` (``loss``), a key that more than one of them has is shown once, with all that it may be.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from forge_core.config.run_config import RunConfig
from forge_core.config.section import Section

_OR = " Or: "
_MODEL: ContextVar[type[Section]] = ContextVar("model", default=RunConfig)


def key_fields() -> dict[str, FieldInfo]:
    """Every key of a configuration, sections included, in declared order."""
    return _all_fields(_MODEL.get())


@contextmanager
def keys_of(model: type[Section]) -> Iterator[None]:
    """Within it, the keys are those of another kind of configuration."""
    token = _MODEL.set(model)
    try:
        yield
    finally:
        _MODEL.reset(token)


@cache
def _all_fields(model: type[Section]) -> dict[str, FieldInfo]:
    return _fields_of(model, "")


def starred(path: str) -> str:
    """The path with list indices as ``*``."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def field_at(path: str) -> FieldInfo | None:
    return key_fields().get(starred(path))


def children(path: str) -> list[str]:
    """The names of the keys right below a section (``""``: the top)."""
    prefix = f"{starred(path)}." if path else ""
    rest = [key.removeprefix(prefix) for key in key_fields() if key.startswith(prefix)]
    return [name for name in rest if "." not in name and name != "*"]


def is_text_only(path: str) -> bool:
    """Whether a value there can only be text (or null)."""
    field = field_at(path)
    return field is not None and field.annotation in (str, str | None)


def requirement(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """What a value must be, in plain words: ``a whole number, at least 1``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [m for item in arguments[1:] for m in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return requirement(arguments[0], (*inner, *metadata))
    if origin in (Union, types.UnionType):
        if len(sections := _sections_in(annotation)) > 1:
            names = [name for section, _ in sections for name in choices(section.model_fields["name"].annotation)]
            null = ", or null" if types.NoneType in arguments else ""
            return f"a section with a name, one of {', '.join(names)}{null}"
        words = [requirement(a, metadata) for a in arguments if a is not types.NoneType]
        return ", or ".join([*words, "null"] if types.NoneType in arguments else words)
    return _words(annotation, origin, arguments) + "".join(f", {bound}" for bound in _bounds(metadata))


def choices(annotation: Any) -> list[str]:
    """The words that a value may be, where it may only be one of some words."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for argument in get_args(annotation) for choice in choices(argument)]


def kinds_with(path: str) -> list[str]:
    """The names of the sections that have a key, where its section is one of several."""
    parent, _, leaf = path.rpartition(".")
    section = field_at(parent) or field_at(parent.rpartition(".")[0])  # of an element of a list: the list
    found = _sections_in(section.annotation) if section else []
    if len(found) < 2:
        return []
    return [c for kind, _ in found if leaf in kind.model_fields for c in choices(kind.model_fields["name"].annotation)]


def field_requirement(field: FieldInfo) -> str:
    return requirement(field.annotation, tuple(field.metadata))


def fields_reference() -> str:
    """Markdown: one table a section with every key, what it accepts, its default and its meaning."""
    sections: dict[str, list[str]] = {}
    for path, field in key_fields().items():
        if children(path) or path.endswith("*"):
            continue
        section = path.rpartition(".")[0]
        meaning = (field.description or "").replace("<", "&lt;")  # else Markdown takes <name> for a tag
        cells = [f"`{path}`", field_requirement(field), _default(field), meaning]
        sections.setdefault(section, []).append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    head = ["| key | accepts | default | meaning |", "| --- | --- | --- | --- |"]
    blocks = ["\n".join([f"### {name or 'Top level'}", "", *head, *rows]) for name, rows in sections.items()]
    return "\n\n".join(blocks) + "\n"


def _fields_of(section: type[Section], prefix: str, around: tuple[type[Section], ...] = ()) -> dict[str, FieldInfo]:
    """``around``: the sections that this one is in; one that may hold its own kind is not followed further."""
    found: dict[str, FieldInfo] = {}
    within = (*around, section)
    for name, field in section.model_fields.items():
        found[prefix + name] = field
        for inner, star in _sections_in(field.annotation):
            if inner in within:
                continue
            for key, one in _fields_of(inner, f"{prefix}{name}.*." if star else f"{prefix}{name}.", within).items():
                found[key] = _either(found[key], one) if key in found else one
    return found


def _either(one: FieldInfo, other: FieldInfo) -> FieldInfo:
    """One description of a key that two alternatives of a section have."""
    both = copy(one)
    if get_origin(one.annotation) is Literal and get_origin(other.annotation) is Literal:
        both.annotation = Literal[(*get_args(one.annotation), *get_args(other.annotation))]  # type: ignore[assignment]
    elif one.annotation != other.annotation:
        both.annotation = one.annotation | other.annotation  # type: ignore[assignment, operator]
    texts = [text for field in (one, other) for text in (field.description or "").split(_OR)]
    both.description = _OR.join(dict.fromkeys(texts))
    values = [value for field in (one, other) if not field.is_required() for value in _defaults(field)]
    if values:
        both.default = _Several(value for i, value in enumerate(values) if value not in values[:i])
    return both


class _Several(list):
    """The defaults of a key whose alternatives differ in them."""


def _defaults(field: FieldInfo) -> list[Any]:
    return field.default if isinstance(field.default, _Several) else [field.default]


def _sections_in(annotation: Any, star: bool = False) -> list[tuple[type[Section], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [(annotation, star)]
    inside = star or get_origin(annotation) is list
    return [found for argument in get_args(annotation) for found in _sections_in(argument, inside)]


def _words(annotation: Any, origin: Any, arguments: tuple[Any, ...]) -> str:
    if origin is Literal:
        return "one of " + ", ".join(choices(annotation))
    if origin is list:
        return f"a list, each {requirement(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {requirement(arguments[0])}"
    if origin is dict:
        return "a mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "a section with the keys " + ", ".join(annotation.model_fields)
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[annotation]


def _bounds(metadata: tuple[Any, ...]) -> list[str]:
    words = {
        annotated_types.Ge: ("ge", "at least"),
        annotated_types.Gt: ("gt", "above"),
        annotated_types.Le: ("le", "at most"),
        annotated_types.Lt: ("lt", "below"),
    }
    pairs = [(words[type(m)], m) for m in metadata if type(m) in words]
    return [f"{word} {getattr(m, attribute):.10g}" for (attribute, word), m in pairs]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return " or ".join(_shown(value) for value in _defaults(field))


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        value = list(value)
    return f"`{value}`"
