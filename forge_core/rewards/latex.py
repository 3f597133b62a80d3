"""Whether two short texts are the same mathematics: LaTeX, numbers with units, choices, plain words.

``equal`` never raises for what a model may write; it may take for ever (sympy), so it runs where it can be killed.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from forge_core.rewards.numbers import close, last_number, plain_number
from forge_core.rewards.units import split_unit, units_differ

_SPACES = re.compile(r"\\[,;:! ]|\\q?quad\b|~|\u202f|\u00a0")
_ENDS = re.compile(r"\s*(?:\\\(|\\\[)?\s*(.*?)\s*[.,;:]*\s*(?:\\\)|\\\])?\s*[.,;:]*\s*", re.DOTALL)
_CHOICE = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*)*\(?\s*([A-Za-z])\s*\)?\s*\}*")
_MIXED = re.compile(r"([-+]?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
_WITH_BASE = re.compile(r"([0-9A-Za-z]+)_\{?(\d{1,2})\}?")
_ANCHOR = re.compile(r"\b(?:answer|result|solution)\b\s*(?:is|are|:|=)+\s*:?\s*", re.IGNORECASE)
_CLAUSE = re.compile(r"[.;](?=\s|$)|\n|,?\s+(?:because|since|which|where|so|as)\b")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_DIGITS = 30  # decimal digits to which exact numbers are compared


def equal(gold: str, given: str, tolerance: float) -> bool:
    """Whether ``given`` is the answer ``gold``. ``tolerance``: largest difference of two plain numbers."""
    wanted, answer = tidy(gold), tidy(given)
    if not wanted or not answer:
        return False
    if wanted == answer:
        return True
    letters = _CHOICE.fullmatch(wanted), _CHOICE.fullmatch(answer)
    if letters[0] and letters[1]:
        return letters[0][1] == letters[1][1]
    if units_differ(wanted, answer):
        return False
    wanted, answer = split_unit(wanted)[0], split_unit(answer)[0]
    numbers = plain_number(wanted), plain_number(answer)
    if numbers[0] is not None and numbers[1] is not None:
        return close(numbers[1], numbers[0], tolerance)
    return any(_same(g, a) for g in _readings(wanted) for a in _readings(answer))


def last_expression(text: str) -> str | None:
    """The last expression of a text without marks: what follows ``the answer is``, else the last formula, else the
    whole of a text without words, else the last number. None where there is nothing like that."""
    anchors = list(_ANCHOR.finditer(text))
    if anchors:
        tail = text[anchors[-1].end() :]
        formula = _FORMULA.match(tail.lstrip())
        return _inside(formula) if formula else _CLAUSE.split(tail, maxsplit=1)[0].strip() or None
    formulas = list(_FORMULA.finditer(text))
    if formulas:
        return _inside(formulas[-1])
    if not re.search(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text) and len(text) <= 200:
        return text.strip() or None
    return last_number(text)


def _inside(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()


def tidy(text: str) -> str:
    """``text`` without dollar signs and brackets of a formula around it, LaTeX spaces and punctuation at its end."""
    match = _ENDS.fullmatch(re.sub(r"(?<!\\)\$", "", text))
    inner = match[1] if match else text
    if re.fullmatch(r"[-+]?\s*[\d\\,~\s]+(\.\d+)?", inner) and plain_number(inner) is not None:
        return inner  # the spaces group digits
    return " ".join(_SPACES.sub(" ", inner).split()).rstrip(" .,;:")


def _readings(text: str) -> list[str]:
    """``text`` as math-verify reads it rightly; twice where it has two meanings (``\\log``)."""
    number = plain_number(text)
    if number is not None:
        mantissa, _, power = f"{number:E}".partition("E")
        return [f"{number:f}" if abs(int(power)) < 50 else rf"{mantissa} \times 10^{{{int(power)}}}"]
    text = _REPEATING.sub(_fraction, text.replace(r"\varnothing", r"\emptyset"))
    if mixed := _MIXED.fullmatch(text):
        text = rf"{mixed[1]}({mixed[2]}+\frac{{{mixed[3]}}}{{{mixed[4]}}})"
    if (with_base := _WITH_BASE.fullmatch(text)) and (value := _in_base(with_base[1], int(with_base[2]))) is not None:
        text = str(value)
    natural = re.sub(r"\\log\b(?!\s*_)", r"\\ln", text)
    return [text] if natural == text else [text, natural]


def _fraction(match: re.Match[str]) -> str:
    whole, fixed, repeated = match.groups()
    nines = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    value = int(whole or 0) + Fraction(int(fixed or 0), 10 ** len(fixed)) + Fraction(int(repeated), nines)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _in_base(digits: str, base: int) -> int | None:
    try:
        return int(digits, base) if base >= 2 and any(d.isdigit() for d in digits) else None
    except ValueError:  # digits that the base does not have: a name with an index
        return None


def _same(gold: str, given: str) -> bool:
    from math_verify import verify

    for wanted in _parsed(gold):
        for answer in _parsed(given):
            ways = ((wanted, answer), (answer, wanted))  # a relation and its interval are compared one way only
            if any(verify(a, b, timeout_seconds=None) for a, b in ways) and _exactly(wanted, answer):
                return True
            if _same_complex(wanted, answer):
                return True
    return False


@lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Any]:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns, every time, that nothing ends what hangs
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    # Units have been looked at; left to math-verify, the product 2m would be 2.
    kept = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    ways = [LatexExtractionConfig(normalization_config=kept), ExprExtractionConfig()]
    return parse(f"${text}$", ways, parsing_timeout=None)


def _exactly(one: Any, other: Any) -> bool:
    """False for two numbers that only round to the same: a decimal is taken as it is written."""
    a, b = _exact_number(one), _exact_number(other)
    if a is None or b is None:
        return True
    return a == b or abs((a - b).evalf(_DIGITS)) <= Decimal(10) ** (3 - _DIGITS) * max(1, abs(b.evalf()))


def _exact_number(expression: Any) -> Any:
    import sympy

    if isinstance(expression, sympy.Eq):
        expression = expression.rhs
    if not isinstance(expression, sympy.Expr) or not expression.is_number or not expression.is_finite:
        return None
    floats = expression.atoms(sympy.Float)
    return expression.xreplace({value: sympy.Rational(str(value)) for value in floats})


def _same_complex(one: Any, other: Any) -> bool:
    """Whether both are the same number when ``i`` is the imaginary unit and ``e`` Euler's number."""
    import sympy

    if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)):
        return False
    names = {"i": sympy.I, "e": sympy.E}
    a, b = (x.subs({s: names[s.name] for s in x.free_symbols if s.name in names}) for x in (one, other))
    return (a, b) != (one, other) and bool(a.is_number and b.is_number) and sympy.simplify(a - b) == 0
