"""JSON-able stand-ins for Python values that JSON changes.

Guarantee: ``decode(json.loads(json.dumps(encode(value)))) == value`` for nested dicts, lists, tuples, sets, text,
numbers, booleans and None. Verifiers compare tuples and look up integer keys, both of which plain JSON would turn
into something else. Values that JSON keeps are encoded as themselves.
"""

from __future__ import annotations

from typing import Any

_TUPLE, _SET, _DICT = "__tuple__", "__set__", "__dict__"


def encode(value: Any) -> Any:
    """``value`` in JSON types. Raises TypeError for a type outside the list above."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [encode(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {_SET: [encode(item) for item in sorted(value, key=repr)]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: encode(item) for key, item in value.items()}
        return {_DICT: [[encode(key), encode(item)] for key, item in value.items()]}
    raise TypeError(f"cannot store a value of type {type(value).__name__} as JSON")


def decode(value: Any) -> Any:
    """The inverse of ``encode``."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(decode(item) for item in value[_TUPLE])
    if _SET in value:
        return {decode(item) for item in value[_SET]}
    if _DICT in value:
        return {decode(key): decode(item) for key, item in value[_DICT]}
    return {key: decode(item) for key, item in value.items()}
