"""Verdicts on the code of a reply, and comparisons of its results, which are plain values here."""

from __future__ import annotations

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


def lines_of(output: str) -> list[str]:
    """Return the lines of an output as they are compared: no spaces at their ends, no empty lines at the end."""
    return [line.rstrip() for line in output.rstrip().splitlines()]


def shown(value: Any) -> str:
    """Return a value as text for messages."""
    try:
        return clean(repr(value)[:200])
    except (ValueError, RecursionError):
        return f"a value of the type {type(value).__name__} that cannot be shown"


def clean(text: str) -> str:
    """Return a text that UTF-8 can encode."""
    return text.encode(errors="replace").decode()
