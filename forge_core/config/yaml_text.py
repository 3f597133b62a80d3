"""YAML text to plain values and back.

Guarantees:
- Scalars follow YAML 1.2's core schema instead of PyYAML's 1.1: ``1e-6`` is a number, ``2024-01-01``, ``010``, ``1:30``
  and ``no`` are text, only ``true`` and ``false`` are booleans. ``None`` is null.
- A key given twice is a problem with both line numbers, never a silent overwrite.
- ``load_yaml(dump_yaml(value)) == value``: writer and reader share one table of scalars.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_FLOAT = (
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
)
_SCALARS = [
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", r"~|null|Null|NULL|None|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}


for _class in (_Loader, _Dumper):
    for _tag, _pattern, _first in _SCALARS:
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), list(_first))


def load_yaml(text: str) -> tuple[Any, list[str]]:
    """The value of one YAML document, and the problems of its keys (given twice, not text).

    Raises ``yaml.YAMLError`` where the text is no YAML at all.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, []
        problems = _key_problems(node, "", set())  # first: constructing copies merged keys into the nodes
        return loader.construct_document(node), problems
    finally:
        loader.dispose()


def dump_yaml(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def yaml_mistake(error: yaml.YAMLError) -> str:
    """One line for a syntax error: where it is and what the parser expected."""
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}, column {mark.column + 1}: {what}" if mark else what


def _key_problems(node: yaml.Node, path: str, seen: set[int]) -> list[str]:
    if id(node) in seen:  # an alias: its anchor has been looked at
        return []
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        return [p for i, item in enumerate(node.value) for p in _key_problems(item, f"{path}{i}.", seen)]
    if not isinstance(node, yaml.MappingNode):
        return []
    problems: list[str] = []
    lines: dict[str, int] = {}
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        name, line = str(key.value), key.start_mark.line + 1
        if key.tag != "tag:yaml.org,2002:str":
            problems.append(f"{path}{name}: line {line}: a key must be text: write it in quotes")
        elif name in lines:
            problems.append(f"{path}{name}: given twice, in line {lines[name]} and line {line}: keep one")
        lines.setdefault(name, line)
        problems += _key_problems(value, f"{path}{name}.", seen)
    return problems
