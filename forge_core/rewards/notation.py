"""Notation that math-verify does not read, or reads in part, brought into one that it reads.

Unicode signs become LaTeX, ``5 million`` a number, ``x = 2, y = 3`` the pair (2, 3). What math-verify reads in part
(``5\\\\6``, ``5|6`` and ``\\ge 5`` as 5) is told of.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

_SIGNS = {
    "\u221e": r"\infty ",
    "\u00b7": r"\cdot ",
    "\u22c5": r"\cdot ",
    "\u2212": "-",
    "\u2044": "/",
    "\u2205": r"\emptyset ",
}
_ROOT = re.compile("\u221a\\s*(?:\\(([^()]*)\\)|(\\w+))")
_RAISED, _LOWERED = (
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207f",
    "\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089",
)
_PLAIN = str.maketrans(_RAISED + _LOWERED, "0123456789-n" + "0123456789")
_FRACTIONS = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_MANY = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SCALED = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<number>\d[\d,]*(?:\.\d+)?)\s*(?P<open>\\(?:text|mathrm|textrm|mbox)\s*\{{\s*)?"
    rf"(?P<word>{'|'.join(_MANY)})\b\s*(?P<rest>.*)",
    re.DOTALL | re.IGNORECASE,
)
_ASSIGNED = re.compile(r"\s*([A-Za-z](?:_\{?\w+\}?)?)\s*=([^=]+)")
_AND = re.compile(r"\\text\s*\{\s*(?:and|,)\s*\}|\band\b|\\\\|\\quad")
_HALF_READ = (  # a new line, a bar, a space between numbers, dots, operators with one side, digits in words
    re.compile(r"\\\\|(?<!\\)&"),
    re.compile(r"\d\s*\|\s*-?\d"),
    re.compile(r"\A\d[\d ]* \d+\Z"),
    re.compile(r"\.\.|\\[lc]?dots\b"),
    re.compile(r"[-+*/=^_<>]\s*\Z"),
    re.compile(r"\A\s*(?:\\(?:geq?|leq?|neq?|gt|lt)\b|[<>=\u2264\u2265])"),
    re.compile(r"\d\s*\\(?:text|mathrm)\s*\{[^{}]*\d"),
)


def in_latex(text: str) -> str:
    """``text`` with LaTeX in place of Unicode's signs of mathematics."""
    if text.isascii():
        return text
    for sign, latex in _SIGNS.items():
        text = text.replace(sign, latex)
    text = _FRACTIONS.sub(lambda sign: " " + unicodedata.normalize("NFKC", sign[0]).replace("\u2044", "/"), text)
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2]}}}", text)
    text = re.sub(f"[{_RAISED}]+", lambda digits: f"^{{{digits[0].translate(_PLAIN)}}}", text)
    return re.sub(f"[{_LOWERED}]+", lambda digits: f"_{{{digits[0].translate(_PLAIN)}}}", text).strip()


def in_digits(text: str) -> str:
    """``5 million`` as 5000000; what follows (a unit) stays."""
    scaled = _SCALED.fullmatch(text)
    if scaled is None:
        return text
    value = Decimal(scaled["number"].replace(",", "")) * _MANY[scaled["word"].lower()]
    rest = rf"\text{{{scaled['rest']}" if scaled["open"] else scaled["rest"]
    return f"{scaled['sign']}{value:f} {rest}".strip().removesuffix(r"\text{}").strip()


def assigned(text: str) -> dict[str, str] | None:
    """The values of different names, such as ``x = 2, y = 3``; None when ``text`` is anything else."""
    parts = [_ASSIGNED.fullmatch(part) for part in re.split(r"[,;]", _AND.sub(",", text)) if part.strip()]
    found = {part[1]: part[2].strip() for part in parts if part}
    return found if len(found) == len(parts) > 1 else None


def in_order(text: str) -> str:
    """``x = 2, y = 3`` as ``(2, 3)``, in the order of the names."""
    values = assigned(text)
    return text if values is None else f"({', '.join(values[name] for name in sorted(values))})"


def half_read(one: str, other: str) -> bool:
    """Whether one of two texts has a sign that math-verify stops at, and the other has none like it."""
    if r"\begin" in one + other:
        return False
    return any(bool(sign.search(one)) != bool(sign.search(other)) for sign in _HALF_READ)
