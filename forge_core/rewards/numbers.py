"""Numbers as language models write them."""

from __future__ import annotations

import re
from decimal import Decimal

# A minus after a digit or a bracket subtracts; a comma groups three digits; a full stop without digits ends a sentence.
_NUMBER = re.compile(r"(?:(?<![\w)\]])[-\u2212])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?")


def last_number(text: str) -> str | None:
    """The last number in ``text`` (integer, decimal or fraction) without digit grouping; None if there is none."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "").replace("\u2212", "-") if found else None


def as_integer(text: str | None) -> int | None:
    """The integer that ``text`` (a result of ``last_number``) is; 3.0 is one, 3.5 and 1/2 are not."""
    if text is None or "/" in text:
        return None
    value = Decimal(text)
    return int(value) if value == value.to_integral_value() else None
