"""Units behind numbers, as far as they decide whether two answers are the same."""

from __future__ import annotations

import re

_NAMES = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard",
    "mi": "mi mile",
    "mg": "mg milligram",
    "g": "g gram",
    "kg": "kg kilogram",
    "lb": "lb lbs pound",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hour",
    "day": "day",
    "week": "week",
    "year": "year yr",
    "ml": "ml milliliter millilitre",
    "l": "l liter litre",
    "degree": "degree deg",
    "radian": "radian rad",
    "cent": "cent",
    "dollar": "dollar usd",
    "euro": "euro eur",
    "mph": "mph",
}
_UNITS = {word: unit for unit, words in _NAMES.items() for word in words.split()}
_POWERS = {"square": 2, "sq": 2, "cubic": 3}
_TAIL = re.compile(
    r"(?P<rest>.*[\d)}a-z])\s*"
    r"(?:\\(?:text|mathrm|textrm|mbox)\s*\{(?P<text>[^{}\d]*)\}|(?<![\\A-Za-z])(?P<bare>[A-Za-z][A-Za-z ]*))"
    r"\s*(?:(?:\^|\*\*)\s*\{?(?P<power>\d)\}?)?",
    re.DOTALL,
)
_DEGREES = re.compile(r"(?P<rest>.*\d)\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree\b|\u00b0)", re.DOTALL)

Unit = tuple[str, int]
"""The unit and its power: ``("cm", 2)``."""


def split_unit(text: str) -> tuple[str, Unit | None]:
    """``text`` without the unit at its end, and that unit: None when there is none, or none that is known (apples)."""
    if degrees := _DEGREES.fullmatch(text):
        return degrees["rest"].strip(), ("degree", 1)
    match = _TAIL.fullmatch(text)
    if match is None:
        return text, None
    power, unit = int(match["power"] or 1), None
    for word in (match["text"] or match["bare"] or "").lower().rstrip(".").split():
        power = _POWERS.get(word, power)
        unit = unit or _UNITS.get(word) or _UNITS.get(word.removesuffix("s"))
    if match["text"] is None and not _apart(match):
        return text, None
    return match["rest"].strip(), (unit, power) if unit else None


def _apart(match: re.Match[str]) -> bool:
    """Whether letters that stand behind a number may be a unit: 2m is a product, 2 m is not."""
    number = re.fullmatch(r"[-+]?\\?\$?[\d.,/ ]+|[-+]?\d*\s*\\d?frac\{\d+\}\{\d+\}", match["rest"])
    return number is not None and (len(match["bare"].strip()) > 1 or match.string[match.end("rest")].isspace())


def units_differ(one: str, other: str) -> bool:
    """Whether both texts end with a known unit, and not with the same one. Without a unit, the other's is meant."""
    first, second = split_unit(one)[1], split_unit(other)[1]
    return first is not None and second is not None and first != second
