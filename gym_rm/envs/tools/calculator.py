"""The tool `"calculator"`: exact arithmetic."""

from __future__ import annotations

import ast
import decimal
import math
import operator
from fractions import Fraction
from typing import Any

MOST_CHARACTERS = 1000
MOST_BITS = 10_000  # of a numerator or denominator
DIGITS = 20


def calculator(expression: str) -> str:
    """Compute an arithmetic expression of numbers, + - * / // % ** and parentheses.

    Integers and decimals are exact; other results have 20 digits.

    Args:
        expression: for example "(3 + 4) * 2 ** 10 / 7".

    Raises:
        ValueError: the expression has something else, or a number in it becomes too large.

    Example:
        >>> calculator("0.1 + 0.2"), calculator("2 ** 100"), calculator("1 / 3")
        ('0.3', '1267650600228229401496703205376', '0.33333333333333333333')
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"an expression may have {MOST_CHARACTERS} characters, got {len(expression)}")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    if value.denominator == 1:
        return str(value.numerator)
    with decimal.localcontext(prec=DIGITS, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN):
        quotient = (decimal.Decimal(value.numerator) / decimal.Decimal(value.denominator)).normalize()
        return format(quotient, "f" if abs(quotient.adjusted()) < DIGITS else "")


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool) and math.isfinite(number):
            return _bounded(Fraction(repr(number)))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return Fraction(_OPERATORS[type(op)](_value(operand)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(Fraction(_OPERATORS[type(op)](_value(left), _value(right))))
    raise ValueError(f"only numbers, + - * / // % ** and parentheses are known, got {ast.unparse(node)[:40]!r}")


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise ValueError(f"a number has more than {MOST_BITS} bits")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        root = float(base) ** float(exponent)
        if isinstance(root, complex):
            raise ValueError("the root of a negative number is not real")
        return Fraction(repr(root))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (bits - 1) * abs(exponent) > MOST_BITS:
        raise ValueError(f"a power has more than {MOST_BITS} bits")
    return Fraction(base**exponent.numerator)


_OPERATORS: dict[type[Any], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
