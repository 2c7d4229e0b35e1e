"""Verdicts on the code of a reply, and comparisons of its results, which are plain values here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

VERDICTS = ("passed", "wrong_answer", "exception", "syntax_error", "time", "memory", "output", "forbidden", "no_code")


@dataclass(frozen=True, slots=True)
class CodeVerdict:
    """Result of the tests of one row.

    Attributes:
        verdict: one of `VERDICTS`; `"error"` if the row has no score.
        passed, total: number of tests that passed, and of all.
        stdout: what the model's code printed.
        message: the first error, or the first difference.
        error: why the row has no score: a fault of the tests or of the machine, never of the reply.
    """

    verdict: str
    passed: int = 0
    total: int = 0
    stdout: str = ""
    message: str = ""
    error: str | None = None

    @classmethod
    def failed(cls, error: str, total: int = 0) -> CodeVerdict:
        """Return the verdict of a row without a score."""
        return cls("error", 0, total, error=error)


_BETWEEN = re.compile(r"([\s\[\](){},;:=]+)")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(\.[0-9]*)?|(\.[0-9]+))([eE][+-]?[0-9]+)?")


def is_output(output: str, expected: str, tolerance: float) -> bool:
    """Return whether a program printed what was expected, except for spaces at the ends of lines and of the text.

    Numbers that are expected with a decimal point or an exponent may differ by `tolerance`, absolute or relative.
    """
    lines, wanted = ([line.rstrip() for line in each.rstrip().splitlines()] for each in (output, expected))
    words, hoped = (_BETWEEN.split("\n".join(each)) for each in (lines, wanted))
    return lines == wanted or (len(words) == len(hoped) and all(map(_is_near, words, hoped, [tolerance] * len(words))))


def _is_near(word: str, expected: str, tolerance: float) -> bool:
    number = None if word == expected else _NUMBER.fullmatch(expected)
    if number is None or not any(number.groups()) or not _NUMBER.fullmatch(word):
        return word == expected
    largest = tolerance * max(1.0, abs(float(expected)))
    return abs(float(word) - float(expected)) <= largest < math.inf


def shown(value: Any) -> str:
    """Return a value as text for messages."""
    try:
        return clean(repr(value)[:200])
    except (ValueError, RecursionError):
        return f"a value of the type {type(value).__name__} that cannot be shown"


def clean(text: str) -> str:
    """Return a text that UTF-8 can encode."""
    return text.encode(errors="replace").decode()
