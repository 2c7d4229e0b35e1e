"""Compares formulas with math-verify. Runs in the sandbox, whose interpreters have imported math-verify already."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Float, I, Rational, Symbol

MOST_REFERENCES = 4096
CONFIG = [LatexExtractionConfig(boxed_match_priority=0)]
parsed_references: dict[str, list[Any]] = {}


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


def read_references(texts: list[str], seconds: float) -> bool:
    """Parse references that are new, and return whether one of them is a formula."""
    if len(parsed_references) > MOST_REFERENCES:
        parsed_references.clear()
    with processor_time(seconds):
        parsed_references.update({text: parsed(text) for text in texts if text not in parsed_references})
    return any(parsed_references[text] for text in texts)


def compare(references: list[str], answer: str, seconds: float) -> str:
    """Return whether an answer equals one of the references: `right`, `wrong` or `unparsable`."""
    known = [formula for text in references for formula in parsed_references[text]]
    is_set = any("infty" in text or "\\cup" in text or text.startswith("[") for text in references)
    with processor_time(seconds):
        if not (formulas := parsed(answer)):
            return "unparsable"
        try:
            forms = [(known, formulas)]
            if (changed := (exact(known), exact(formulas))) != forms[0]:  # 2^{0.5} is a root
                forms.append(changed)
            right = any(verify(*each, timeout_seconds=None, allow_set_relation_comp=is_set) for each in forms)
            return "right" if right else "wrong"
        except Exception:  # also RecursionError and MemoryError
            return "unparsable"
