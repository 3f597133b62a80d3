"""Values as JSON, on both sides of a sandbox's wall: nothing comes through that can do anything.

Plain are None, bool, int, float, complex, str, bytes, and lists, tuples, sets, frozensets and dicts of plain values; a
value of a class derived from one of these arrives as the type itself, so that none brings a ``__eq__`` of its own.
Anything else stays where it is, and its number travels (``encode``'s ``keep``). Standard library only: it is copied
into the image.
"""

import json

SEQUENCES = (list, tuple, set, frozenset)
MAX_DIGITS = 100_000  # of an integer, in hexadecimal


class NotPlain(ValueError):
    """What came through is no value of ours."""


def encode(value, keep):
    """``value`` as what JSON can hold; ``keep(value)`` gives the number of one that is not plain."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return {"int": int.__format__(value, "x")}
    if isinstance(value, float):
        return {"float": float.hex(value)}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, bytes):
        return {"bytes": bytes.hex(value)}
    if isinstance(value, dict):
        return {"dict": [[encode(key, keep), encode(item, keep)] for key, item in dict.items(value)]}
    for kind in SEQUENCES:
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, keep) for item in kind(value)]}
    return {"object": keep(value)}


def decode(data, find):
    """The value of ``data``; ``find(number)`` gives what stands for one that is not plain. Raises NotPlain."""
    try:
        return _decode(data, find)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise NotPlain(f"{type(error).__name__}: {error}") from None


def _decode(data, find):
    if data is None or type(data) in (bool, str):
        return data
    ((kind, body),) = data.items()
    if kind == "int":
        if len(body) > MAX_DIGITS:
            raise ValueError("an integer is too long")
        return int(body, 16)
    if kind == "float":
        return float.fromhex(body)
    if kind == "complex":
        return complex(float.fromhex(body[0]), float.fromhex(body[1]))
    if kind == "bytes":
        return bytes.fromhex(body)
    if kind == "dict":
        return {_decode(key, find): _decode(item, find) for key, item in body}
    if kind == "object":
        return find(body)
    (made,) = (sequence for sequence in SEQUENCES if sequence.__name__ == kind)
    return made(_decode(item, find) for item in body)


def dumps(message):
    """One line."""
    return json.dumps(message).encode() + b"\n"


def loads(line):
    """Raises NotPlain."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotPlain(f"{type(error).__name__}: {error}") from None
    if type(message) is not dict:
        raise NotPlain("a message is not an object")
    return message
