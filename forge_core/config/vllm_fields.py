"""The settings that the installed vLLM takes, and of which types, read from its source.

Invariants:
- vLLM is not imported: that takes seconds and changes the process.
- Types that are neither Python's plain ones nor made of them are not looked at: vLLM itself judges such values.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Union

from pydantic import ConfigDict, Strict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

_PLAIN = {name: Annotated[kind, Strict()] for name, kind in (("int", int), ("float", float), ("bool", bool))} | {
    "str": Annotated[str, Strict()],
    "dict": Annotated[dict[Any, Any], Strict()],
}


@dataclass(frozen=True)
class Field:
    """A setting; ``text``: its type as vLLM writes it."""

    text: str
    kind: Any

    def takes(self, value: Any) -> bool:
        try:
            TypeAdapter(self.kind).validate_python(value)
        except ValidationError:
            return False
        return True


def engine_arguments() -> Mapping[str, Field]:
    """The arguments that the installed vLLM's asynchronous engine takes."""
    return _fields("engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs"))


def sampling_parameters() -> Mapping[str, Field]:
    return _fields("sampling_params.py", ("SamplingParams",))


def vllm_folder() -> Path | None:
    """Where vLLM is installed; None: nowhere."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


@cache
def _fields(file: str, classes: tuple[str, ...]) -> dict[str, Field]:
    """The public settings of classes in a file of vLLM."""
    folder = vllm_folder()
    assert folder is not None
    tree = ast.parse((folder / file).read_text(encoding="utf-8"))
    bodies = {node.name: _annotations(node) for node in tree.body if isinstance(node, ast.ClassDef)}
    parts = {n: _mapping(n, bodies[n]) for n in bodies if n.endswith("Params") and n not in classes}
    annotated = {name: annotation for c in classes for name, annotation in bodies.get(c, {}).items()}
    return {name: Field(_text(a, bodies), _kind(a, parts)) for name, a in annotated.items()}


def _annotations(node: ast.ClassDef) -> dict[str, ast.expr]:
    """The public annotated names of a class."""
    found = [(s.target, s.annotation) for s in node.body if isinstance(s, ast.AnnAssign)]
    return {t.id: a for t, a in found if isinstance(t, ast.Name) and not t.id.startswith("_")}


def _mapping(name: str, fields: Mapping[str, ast.expr]) -> Any:
    """What a file may give for an instance of a class: a mapping of its fields."""
    of_fields: Any = TypedDict  # mypy knows only those that are written out
    made = of_fields(name, {field: _kind(annotation, {}) for field, annotation in fields.items()}, total=False)
    return with_config(ConfigDict(extra="forbid"))(made)


def _text(annotation: ast.expr, bodies: Mapping[str, Mapping[str, ast.expr]]) -> str:
    named = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name) and bodies.get(node.id)]
    listed = "".join(f" ({name}: a mapping of {', '.join(bodies[name])})" for name in named)
    return ast.unparse(annotation) + listed


def _kind(annotation: ast.expr, parts: Mapping[str, Any]) -> Any:
    """The type that ``annotation`` writes; ``parts``: those of classes; Any for what this does not know."""
    match annotation:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=str(text)):
            return _kind(ast.parse(text, mode="eval").body, parts)
        case ast.Name(id=name):
            return _PLAIN.get(name) or parts.get(name, Any)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return Union[_kind(left, parts), _kind(right, parts)]  # noqa: UP007  # of types known only now
        case ast.Subscript(value=ast.Name(id="list" | "set"), slice=part):  # a file has lists only
            return list[_kind(part, parts)]  # type: ignore[misc]
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, value])):  # JSON's keys are text
            return dict[Any, _kind(value, parts)]  # type: ignore[misc]
    return Any
