"""Secrets of this process's environment stay out of what it writes. The standard library alone: graders import this.

Invariants:
- A variable holds a secret when its name says so (``…_TOKEN``, ``…_KEY``, ``…_PASSWORD`` and the like), or when its
  value is an address with a password in it.
- ``redact`` puts the name of the variable in the place of its value; ``redact_logs`` does so with every log record of
  this process, tracebacks included.
"""

from __future__ import annotations

import logging
import os
import re
import traceback
from typing import Any

WORDS = frozenset(
    {
        *("KEY", "KEYS", "APIKEY", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASS", "PWD", "PASSPHRASE"),
        *("PAT", "CREDENTIAL", "CREDENTIALS", "DSN", "AUTH"),
    }
)
CONNECTION = {"CONNECTION", "STRING"}
FOLDERS = ("PWD", "OLDPWD")  # of the shell
SHORTEST = 8  # characters; shorter values are words that stand everywhere
_PASSWORD_IN_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret."""
    words = set(name.upper().split("_"))
    return name not in FOLDERS and (not WORDS.isdisjoint(words) or words >= CONNECTION)


def is_key_name(name: str) -> bool:
    """Whether a variable of this name holds the key of a service that a reward may ask: not one of the store's, the
    hub's or the machine's secrets, which a configuration could otherwise have sent to any address."""
    return name.isidentifier() and name.upper().endswith("_API_KEY")


def has_password(value: str) -> bool:
    """Whether ``value`` is, or holds, an address with a password, such as ``postgresql://user:password@host``."""
    return _PASSWORD_IN_ADDRESS.search(value) is not None


def redact(text: str) -> str:
    """``text`` with the names of variables in place of the secrets that they hold; the longest first, since one may
    begin another."""
    for name, value in sorted(os.environ.items(), key=lambda item: -len(item[1])):
        if len(value) >= SHORTEST and value in text and (is_secret_name(name) or has_password(value)):
            text = text.replace(value, f"<{name}>")
    return text


def _message(record: logging.LogRecord) -> str:
    """The text of ``record``, also of one whose arguments do not fit: logging says so of it, and its caller goes on."""
    try:
        return record.getMessage()
    except Exception:
        record.msg, record.args = f"{record.msg} {record.args}", ()
        return str(record.msg)


def redact_logs() -> None:
    """From now on no log record of this process holds a secret of its environment. Idempotent."""
    make = logging.getLogRecordFactory()
    if getattr(make, "redacts", False):
        return

    def redacted(*arguments: Any, **keywords: Any) -> logging.LogRecord:
        record = make(*arguments, **keywords)
        message = _message(record)
        if (clean := redact(message)) != message:
            record.msg, record.args = clean, ()
        if record.exc_info and record.exc_info[0] is not None:
            text = "".join(traceback.format_exception(*record.exc_info)).rstrip()
            if (clean := redact(text)) != text:
                record.exc_info, record.exc_text = None, clean  # formatters print the text as it is
        return record

    redacted.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(redacted)
