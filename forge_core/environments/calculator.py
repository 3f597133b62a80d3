"""Mathematics with a calculator. Arithmetic is parsed, never evaluated as Python."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction

from forge_core.environments.tools import ToolEnvironment, ToolError

_MAX_LENGTH, _MAX_BITS, _MAX_EXPONENT = 200, 1024, 512
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """
    Compute an arithmetic expression exactly.

    Args:
        expression: Numbers with + - * / ** and parentheses, such as "(3 + 4) * 12".
    """
    if len(expression) > _MAX_LENGTH:
        raise ToolError(f"the expression has more than {_MAX_LENGTH} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError(f"{expression!r} is no arithmetic expression") from None
    _restore_digits(tree, expression.strip())
    return shown(_value(tree.body))


def shown(value: Fraction) -> str:
    """An integer as it is, a finite decimal as one unless it is too long, anything else to twelve digits."""
    if value.denominator == 1:
        return str(value.numerator)
    places = _decimal_places(value.denominator)
    if places is not None:
        digits = f"{abs(value.numerator) * 10**places // value.denominator:0{places + 1}d}"
        if len(digits) < _MAX_LENGTH:
            return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    return f"{float(value):.12g}"


def _decimal_places(denominator: int) -> int | None:
    """How many decimal places a fraction in lowest terms has; None when they never end."""
    twos = (denominator & -denominator).bit_length() - 1
    rest, fives = denominator >> twos, 0
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    return max(twos, fives) if rest == 1 else None


def _restore_digits(tree: ast.Expression, source: str) -> None:
    """Give decimals in ``tree`` the value they are written with: Python's parser rounds them to 17 digits."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, float):
            written = ast.get_source_segment(source, node) or ""
            node.value = _exact(node.value, written.replace("_", ""))  # type: ignore[assignment]


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | Fraction() as number) if not isinstance(number, bool):
            return _bounded(Fraction(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _binary(_BINARY[type(op)], _value(left), _value(right))
    raise ToolError(f"only numbers, + - * / ** and parentheses are known, not {ast.unparse(node)!r}")


def _exact(rounded: float, written: str) -> Fraction:
    """The number that is ``written``. Only if a float can hold it: the digits of 1e99999999 take for ever."""
    if math.isinf(rounded):
        raise ToolError("a number is too large")
    return Fraction(written) if rounded else Fraction(0)


def _binary(apply: Callable[[Fraction, Fraction], Fraction], left: Fraction, right: Fraction) -> Fraction:
    try:
        return _bounded(apply(left, right))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > _MAX_EXPONENT:
        raise ToolError(f"an exponent is an integer of at most {_MAX_EXPONENT}")
    if max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent.numerator) > _MAX_BITS:
        raise ToolError("the result is too large")
    return _binary(lambda a, b: Fraction(a**b.numerator), base, exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise ToolError("the result is too large")
    return value


class Calculator(ToolEnvironment):
    """Tool ``calculate``."""

    functions = (calculate,)
