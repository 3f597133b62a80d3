"""What a caller of an actor sees when something goes wrong.

What an actor raises is raised to its caller as it is, with the actor's traceback as its cause (``RemoteTraceback``).
An exception that cannot travel between processes becomes an ``ActorError`` with its text; so does one that would mean
something else to the caller than to the actor: ``SystemExit`` and others that are no ``Exception``, which would end the
caller's event loop or cancel its task, and ``StopIteration``, which no future can hold.
"""

from __future__ import annotations

import contextlib
import traceback
from typing import Any

from forge_core.services import cargo


class ActorError(RuntimeError):
    """An actor raised an exception that cannot be brought to its caller: its type and text."""


class ActorDied(RuntimeError):
    """The actor is gone, or was restarted, before it answered."""


class ServiceUnavailable(RuntimeError):
    """No replica of a service could take a request."""


class RemoteTraceback(Exception):
    """Where an actor raised: the text of its traceback."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def packed(error: BaseException) -> tuple[bytes | None, str, str]:
    """``error`` as it travels: its pickle if it survives one, its summary, its traceback."""
    text = "".join(traceback.format_exception(error))
    summary = f"{type(error).__name__}: {error}"
    try:
        body = cargo.dump(error)
        cargo.load(body)
    except Exception:  # whatever a class of the user does while it is pickled
        return None, summary, text
    return body, summary, text


def unpacked(travelled: tuple[bytes | None, str, str]) -> BaseException:
    """What ``packed`` packed, to be raised here."""
    body, summary, text = travelled
    error: Any = ActorError(summary)
    if body is not None:
        with contextlib.suppress(Exception):  # a class that only the actor's process has
            error = raisable(cargo.load(body))
    error.__cause__ = RemoteTraceback(text)
    return error


def raisable(error: BaseException) -> BaseException:
    """``error``, or what is raised to the caller in its place."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return ActorError(f"{type(error).__name__}: {error}")
