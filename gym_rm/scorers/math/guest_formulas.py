"""Compares formulas with math-verify. Runs in the sandbox, whose interpreters have imported math-verify already."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

from math_verify import LatexExtractionConfig, grader, parse, verify
from sympy import Eq, Expr, Float, I, Mul, Number, NumberSymbol, Pow, Rational, Symbol, UnevaluatedExpr, factorial

MOST_REFERENCES = 4096
DIGITS = 60  # of constants that are compared
MOST_DIGITS = 4000  # of integers that are written out
CONFIG = [LatexExtractionConfig(boxed_match_priority=0)]
parsed_references: dict[str, list[Any]] = {}
library_numeric_eq = grader.sympy_numeric_eq


@contextlib.contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """End this process by SIGPROF if the body takes longer than this, without the time in which others run."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def parsed(text: str) -> list[Any]:
    """Return what math-verify reads in LaTeX, nothing if it is no formula."""
    try:
        formulas: list[Any] = parse(f"\\boxed{{{text}}}", CONFIG, fallback_mode="no_fallback", parsing_timeout=None)
    except Exception:  # also RecursionError and MemoryError
        return []
    return formulas


def exact(formulas: list[Any]) -> list[Any]:
    """Return formulas with their decimals as fractions, and i as the imaginary unit; math-verify reads it as a name."""
    names = {Symbol("i", real=real): I for real in (None, True, False)}
    return [
        each if isinstance(each, str) else each.xreplace({**names, **{n: Rational(str(n)) for n in each.atoms(Float)}})
        for each in formulas
    ]


def numerically_equal(gold: Any, found: Any, *settings: int) -> bool:
    """Return whether two constants are equal; math-verify takes every difference below 1e-15 for zero.

    Without decimals they must be equal in `DIGITS` digits of the larger one; decimals as math-verify compares them.
    """
    if hasattr(gold, "shape") or any(getattr(each, "free_symbols", True) for each in (gold, found)):
        return hasattr(gold, "shape") and bool(library_numeric_eq(gold, found, *settings))
    rounded = gold.atoms(Float, UnevaluatedExpr) | found.atoms(Float, UnevaluatedExpr)
    if rounded and not library_numeric_eq(gold, found, *settings):
        return False
    first, second = (each.evalf(DIGITS) for each in (gold, found))
    if not (first.is_finite and second.is_finite):
        return bool(gold == found)
    size = max(abs(first), abs(second))
    if not rounded and size < 10**MOST_DIGITS and all(side.doit().is_Rational for side in (gold, found)):
        return bool(gold.doit() == found.doit())
    if any(each.has(UnevaluatedExpr) for each in (gold, found)):  # 15\% equals 15
        return True
    return bool(abs(first - second) <= size * (Rational(1, 10_000) if rounded else Rational(10) ** (5 - DIGITS)))


grader.sympy_numeric_eq = numerically_equal  # also for the members of sets, tuples and matrices


def flat(product: Any) -> list[Any]:
    """Return the factors of a product of products."""
    return [each for factor in product.args for each in (flat(factor) if isinstance(factor, Mul) else [factor])]


def is_value(formula: Any) -> bool:
    """Return whether a formula is a number that needs no more work: `2^{10}`, `3 \\cdot 10^8`, but not `15+16`."""
    if isinstance(formula, Pow):
        return all(isinstance(each, Number | NumberSymbol) for each in formula.args)
    if isinstance(formula, factorial):
        return isinstance(formula.args[0], Number)
    if isinstance(formula, Mul):
        factors = [each for each in flat(formula) if each not in (1, -1, UnevaluatedExpr(Rational(1, 100)))]
        inner = [each.args[0] if isinstance(each, Pow) and each.args[1] == -1 else each for each in factors]
        plain = [sum(isinstance(each, Number) for each in side) for side in (factors, inner)]
        return plain[0] <= 1 and plain[1] <= 2 and all(is_value(each) for each in inner)
    return isinstance(formula, Number | NumberSymbol)


def read_references(texts: list[str], seconds: float) -> bool:
    """Parse references that are new, and return whether one of them is a formula."""
    if len(parsed_references) > MOST_REFERENCES:
        parsed_references.clear()
    with processor_time(seconds):
        parsed_references.update({text: parsed(text) for text in texts if text not in parsed_references})
    return any(parsed_references[text] for text in texts)


def compare(references: list[str], answer: str, evaluated: bool, seconds: float) -> str:
    """Return whether an answer equals one of the references: `right`, `wrong` or `unparsable`."""
    known = [formula for text in references for formula in parsed_references[text]]
    is_set = any("infty" in text or "\\cup" in text or text[:1] == "[" or text[-1:] == "]" for text in references)
    with processor_time(seconds):
        if not (formulas := parsed(answer)):
            return "unparsable"
        try:
            values = [each.rhs if isinstance(each, Eq) else each for each in formulas]
            if evaluated and any(
                isinstance(one, Expr) and not one.free_symbols and not is_value(one) for one in values
            ):
                return "wrong"
            forms = [(known, formulas)]
            if (changed := (exact(known), exact(formulas))) != forms[0]:  # 2^{0.5} is a root
                forms.append(changed)
            right = any(verify(*each, timeout_seconds=None, allow_set_relation_comp=is_set) for each in forms)
            return "right" if right else "wrong"
        except Exception:  # also RecursionError and MemoryError
            return "unparsable"
