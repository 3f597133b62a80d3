"""Numbers as language models write them."""

from __future__ import annotations

import re
from decimal import Decimal

# A minus after a digit or a bracket subtracts; a comma groups three digits; a full stop without digits ends a sentence.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-\u2212])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
    r"(?:[eE][-+\u2212]?\d+(?!\.?\d))?(?:/\d+)?"
)
_GROUPED = re.compile(r"\d{1,3}(?:(?P<gap>,|\{,\}|\\,|\\ |~|\u202f|\u00a0| )\d{3})(?:(?P=gap)\d{3})*(?:\.\d+)?")
_SCIENTIFIC = re.compile(
    r"(?P<head>[\d.]+)\s*(?:\\times|\\cdot|\u00d7|\*|x)\s*10\s*(?:\^|\*\*)\s*\{?\s*(?P<power>[-+]?\d+)\s*\}?"
)
_PLAIN = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?0*\d{1,9})?")  # Decimal refuses exponents of 19 digits
_LARGEST_EXPONENT = 10_000  # of ten; beyond it, arithmetic on what a model wrote takes for ever
_WRITTEN_OUT = 50  # the largest exponent of a number that is written with all its digits


def last_number(text: str) -> str | None:
    """The last number in ``text`` (integer, decimal or fraction) without digit grouping, and without a power of ten
    (``1e3`` is 1000) unless it has too many digits; None if there is none."""
    found = _NUMBER.findall(text)
    return _written_out(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def _written_out(text: str) -> str:
    value = plain_number(text) if "e" in text.lower() else None
    return text if value is None or abs(value.adjusted()) > _WRITTEN_OUT else f"{value:f}"


def numbers_in(text: str) -> list[Decimal]:
    """Every integer and decimal of ``text`` that is a number of its own: of 15, not 5; of 1/2, neither."""
    found = (match[0].replace("\u2212", "-") for match in _NUMBER.finditer(text) if not _within_word(text, match))
    return [number for number in map(plain_number, found) if number is not None]


def _within_word(text: str, match: re.Match[str]) -> bool:
    before, after = text[max(match.start() - 2, 0) : match.start()], text[match.end() : match.end() + 2]
    return bool(re.search(r"[\w/]$|\d[.,]$", before) or re.match(r"[A-Za-z_/]|[.,]\d", after))


def as_integer(text: str | None) -> int | None:
    """The integer that ``text`` (a result of ``last_number``) is; 3.0 and 1e60 are, 3.5 and 1/2 are not."""
    value = None if text is None else plain_number(text)
    return int(value) if value is not None and value == value.to_integral_value() else None


def plain_number(text: str) -> Decimal | None:
    """The number that all of ``text`` is: an integer or decimal, with a sign, a dollar sign, grouped digits, or a power
    of ten (``1.5e3``, ``3.2 \\times 10^5``); None when it is anything else (``12.34.56``, ``1/2``, ``nan``)."""
    text = re.sub(r"\\?\$", "", text).replace("\u2212", "-").strip()
    sign, digits = (text[0], text[1:].strip()) if text[:1] in ("+", "-") else ("", text)
    if _GROUPED.fullmatch(digits):
        digits = re.sub(r"[^\d.]", "", digits)
    if scientific := _SCIENTIFIC.fullmatch(digits):
        digits = f"{scientific['head']}e{scientific['power']}"
    if not _PLAIN.fullmatch(digits):
        return None
    value = Decimal(sign + digits)
    return value if abs(value.adjusted()) <= _LARGEST_EXPONENT else None


def close(one: Decimal, other: Decimal, tolerance: float) -> bool:
    """Whether two numbers differ by at most ``tolerance``, and by at most that share of the second."""
    return abs(one - other) <= Decimal(str(tolerance)) * min(Decimal(1), abs(other))
