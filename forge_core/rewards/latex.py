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

from forge_core.rewards.formulas import formulas
from forge_core.rewards.notation import assigned, half_read, in_digits, in_latex, in_order
from forge_core.rewards.numbers import close, last_number, plain_number
from forge_core.rewards.units import split_unit, units_differ

_SPACES = re.compile(r"\\[,;:! ]|\\q?quad\b|~|\u202f|\u00a0")
_LONGEST = 500  # characters of an answer, unless the right one is long too: to read more may take for ever
_CHOICE = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*)*\(?\s*([A-Za-z])\s*\)?\s*\}*")
_MIXED = re.compile(r"([-+]?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
_WITH_BASE = re.compile(r"([0-9A-Za-z]+)_\{?(\d{1,2})\}?")
_OPTION = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*)*\(\s*([A-Z])\s*\)\s*\}*\s*\S.*", re.DOTALL)
_NAME = re.compile(r"[A-Za-z]{4,}")
# Words and no products of letters: of four letters or more, or with an o, which names no variable. Shorter ones without
# it cannot be told from products: at is ta, and act may be cat.
_WORD = r"(?:[A-Za-z]{4,}|[A-Za-z]+o[A-Za-z]*|o[A-Za-z]+)"
_WORDS = re.compile(rf"{_WORD}(?: {_WORD})*")
_LETTERS = re.compile(r"[A-Za-z]{2,}(?: [A-Za-z]{2,})*")
_ANCHOR = re.compile(r"\b(?:answer|result|solution|option|choice)\b\s*(?:is|are|:|=)+\s*:?\s*", re.IGNORECASE)
_FILLER = re.compile(
    r"(?:(?:therefore|thus|hence|then|simply|just|approximately|about|option|choice)\b[,:]?\s*)+", re.I
)
_CLAUSE = re.compile(r"[.;](?=\s|$)|\n|,?\s+(?:because|since|which|where|so|as|but|(?:and|but)\s+not|not)\b")
_EMPHASIS = re.compile(r"(?<![\w)\]}*`])(\*\*|\*|`)(?=\S)([^*`\n]{1,500}?)(?<=\S)\1(?![\w(*`])")
_DIGITS = 30  # decimal digits to which exact numbers are compared


def equal(gold: str, given: str, tolerance: float) -> bool:
    """Whether ``given`` is the answer ``gold``. ``tolerance``: largest difference of two plain numbers."""
    wanted, answer = tidy(gold), tidy(given)
    if not wanted or not answer or len(answer) > max(_LONGEST, 4 * len(wanted)):
        return False
    if wanted == answer:
        return True
    letters = _CHOICE.fullmatch(wanted), _CHOICE.fullmatch(answer) or _OPTION.fullmatch(answer)
    if letters[0] and letters[1]:
        return letters[0][1] == letters[1][1]
    if _NAME.fullmatch(wanted) and _NAME.fullmatch(answer):
        return wanted.casefold() == answer.casefold()  # no products: east is not seat
    if _rearranged(wanted, answer):
        return sorted(wanted.casefold().split()) == sorted(answer.casefold().split())  # no is not on
    if units_differ(wanted, answer):
        return False
    wanted, answer = split_unit(wanted)[0], split_unit(answer)[0]
    numbers = plain_number(wanted), plain_number(answer)
    if numbers[0] is not None and numbers[1] is not None:
        return close(numbers[1], numbers[0], tolerance)
    if half_read(wanted, answer) or not _same_names(wanted, answer):
        return False
    return any(_same(g, a) for g in _readings(wanted) for a in _readings(answer))


def _rearranged(words: str, other: str) -> bool:
    """Whether two texts are as many words of the same letters, which are equal as products of these."""
    if not _WORDS.fullmatch(words) or not _LETTERS.fullmatch(other) or words.count(" ") != other.count(" "):
        return False
    return sorted(words.casefold()) == sorted(other.casefold())


def last_expression(text: str) -> str | None:
    """The last expression of a text without marks: what follows ``the answer is``, else the last formula, else the
    whole of a text without words, else the last number. None where there is nothing like that."""
    text = _EMPHASIS.sub(r"\2", text)
    anchors = list(_ANCHOR.finditer(text))
    if anchors:
        return _first_expression(text[anchors[-1].end() :])
    found = list(formulas(text))
    if found:
        return found[-1][1]
    if len(text) <= 200 and not re.search(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text):
        return text.strip() or None
    return last_number(text)


def _first_expression(tail: str) -> str | None:
    """What a text begins with: a formula, else its first clause."""
    tail = tail.lstrip()
    formula = next(formulas(tail), None)
    if formula is not None and formula[0] == 0:
        return formula[1]
    filler = _FILLER.match(tail)
    return _CLAUSE.split(tail[filler.end() if filler else 0 :][: 2 * _LONGEST], maxsplit=1)[0].strip() or None


def _same_names(one: str, other: str) -> bool:
    """False for values of other names: ``x = 2, y = 3`` and ``a = 2, b = 3``."""
    first, second = assigned(one), assigned(other)
    return first is None or second is None or first.keys() == second.keys()


def tidy(text: str) -> str:
    """``text`` without dollar signs and brackets of a formula around it, LaTeX spaces and punctuation at its end, in
    LaTeX's signs."""
    inner = _stripped(" ".join(re.sub(r"(?<!\\)\$", "", text).split()))
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
        inner = _stripped(inner.removeprefix(opening).removesuffix(closing))
    if re.fullmatch(r"[-+]?\s*[\d\\,~\s]+(\.\d+)?", inner) and plain_number(inner) is not None:
        return inner  # the spaces group digits
    inner = inner.replace(r"\langle", "(").replace(r"\rangle", ")")
    return in_digits(_stripped(" ".join(_SPACES.sub(" ", in_latex(inner)).split())))


def _stripped(text: str) -> str:
    return text.strip().rstrip(" .,;:\\")


def _readings(text: str) -> list[str]:
    """``text`` as math-verify reads it rightly; twice where it has two meanings (``\\log``)."""
    number = plain_number(text)
    if number is not None:
        mantissa, _, power = f"{number:E}".partition("E")
        return [f"{number:f}" if abs(int(power)) < 50 else rf"{mantissa} \times 10^{{{int(power)}}}"]
    text = _REPEATING.sub(_fraction, in_order(text).replace(r"\varnothing", r"\emptyset"))
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
            ways = [(wanted, answer)]
            if _is_relation(wanted) or _is_relation(answer):  # with its interval it is compared one way only
                ways.append((answer, wanted))
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


def _is_relation(expression: Any) -> bool:
    import sympy

    return isinstance(expression, sympy.core.relational.Relational | sympy.logic.boolalg.BooleanFunction)


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
