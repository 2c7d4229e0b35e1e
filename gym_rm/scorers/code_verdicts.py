"""What a run of the tests says: its verdict, computed here and not where the model's code runs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from gym_rm.scorers.code_tests import Tests

VERDICTS = (
    "passed",
    "wrong_answer",
    "exception",
    "syntax_error",
    "time",
    "memory",
    "output",
    "forbidden",
    "no_code",
)
_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_GROUPS = (list, tuple, set, frozenset)
_VERDICT_OF_ERROR = {
    "AssertionError": "wrong_answer",
    "Failed": "wrong_answer",
    "PermissionError": "forbidden",
    "MemoryError": "memory",
}
# Names of errors of the tests themselves, unless the model's code raised one of this name.
FAULTS_OF_TESTS = (
    "NameError",
    "ModuleNotFoundError",
    "ImportError",
    "SyntaxError",
    "NotImplementedError",
    "CrossingError",
)


@dataclass(frozen=True, slots=True)
class Outcome:
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
    def failed(cls, error: str, total: int = 0) -> Outcome:
        """Return the outcome of a row without a score."""
        return cls("error", 0, total, error=error)

    def but(self, **changes: Any) -> Outcome:
        """Return a copy with some changes."""
        return dataclasses.replace(self, **changes)


@dataclass(slots=True)
class Calls:
    """What happened in the calls of the model's code during one run of the tests.

    Attributes:
        fault: verdict if the run of the model's code ended: out of time, of memory, ...
        message: of the fault.
        errors: names of the exceptions that the model's code raised.
    """

    fault: str | None = None
    message: str = ""
    errors: set[str] = dataclasses.field(default_factory=set)


def is_fault_of_tests(kind: str, message: str, calls: Calls) -> bool:
    """Return whether an exception that ended the tests says that the tests are wrong, and not the model's code."""
    lacks_name = kind == "ImportError" and "'solution'" in message
    return kind in FAULTS_OF_TESTS and kind not in calls.errors and not lacks_name


def fault_of_tests(kind: str, message: str, total: int) -> Outcome:
    """Return the outcome of a row whose tests are wrong."""
    hint = ". Name it in packages= if an interpreter has it." if kind == "ModuleNotFoundError" else ""
    return Outcome.failed(f"the tests of the row have an error: {message}{hint}", total)


def outcome_of_log(log: Any, tests: Tests, calls: Calls) -> Outcome:
    """Return the outcome of a program of tests from its counters and from the calls of the model's code.

    The total has every assert that must be evaluated and was not; no assert evaluated is not a pass.
    """
    sites, passed, failed = set(log["sites"]), log["passed"], log["failed"]
    missing = len(tests.required - sites)
    total = max(passed + failed + missing, 1)
    first = (log["errors"] or [log["end"]])[0]
    message = "" if first is None else ": ".join(part for part in first if part)
    if calls.fault is not None:
        return Outcome(calls.fault, min(passed, total - 1), total, message=calls.message)
    if first is not None and is_fault_of_tests(first[0], message, calls):
        return fault_of_tests(first[0], message, total)
    if first is None and not missing and passed:
        return Outcome("passed", passed, total)
    if first is None:
        reason = f"{missing} of the asserts were not reached" if missing else "no assert was reached"
        return Outcome("wrong_answer", min(passed, total - 1), total, message=reason)
    verdict = _VERDICT_OF_ERROR.get(first[0], "exception")
    return Outcome(verdict, min(passed, total - (log["end"] is not None)), total, message=message)


def is_plain(value: Any, depth: int = 0) -> bool:
    """Return whether a value has only builtin types, which compare as the language says."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if depth > 100:
        return False
    if kind is dict:
        return all(is_plain(key, depth + 1) and is_plain(one, depth + 1) for key, one in value.items())
    return kind in _GROUPS and all(is_plain(each, depth + 1) for each in value)


def equals(found: Any, expected: Any) -> bool:
    """Return whether a plain result equals the value of a JSON file, where a tuple is a list."""
    try:
        return is_plain(found) and bool(_as_json(found) == _as_json(expected))
    except (ValueError, RecursionError):  # a number of more digits than Python converts
        return False


def shown(value: Any, most: int = 200) -> str:
    """Return a value as text for messages."""
    try:
        return clean(repr(value)[:most])
    except (ValueError, RecursionError):
        return f"a value of the type {type(value).__name__} that cannot be shown"


def clean(text: str) -> str:
    """Return a text that UTF-8 can encode."""
    return text.encode(errors="replace").decode()


def _as_json(value: Any) -> Any:
    if type(value) in (list, tuple):
        return [_as_json(each) for each in value]
    if type(value) is dict:
        return {str(key): _as_json(each) for key, each in value.items()}
    return value


def same_output(found: str, expected: str, tolerance: float | None = None) -> bool:
    """Return whether two outputs have equal lines, without spaces at the ends of lines and empty lines at the end.

    With a tolerance, words that are numbers may differ by it, relative to the expected one or absolute.
    """
    mine, other = _stripped(found), _stripped(expected)
    if mine == other:
        return True
    if tolerance is None or len(mine) != len(other):
        return False
    pairs = [(one.split(), another.split()) for one, another in zip(mine, other, strict=True)]
    return all(
        len(one) == len(another) and all(_near(a, b, tolerance) for a, b in zip(one, another, strict=True))
        for one, another in pairs
    )


def _stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _near(found: str, expected: str, tolerance: float) -> bool:
    if found == expected:
        return True
    try:
        number = float(expected)
        return math.isfinite(number) and abs(float(found) - number) <= tolerance * max(1.0, abs(number))
    except ValueError:
        return False
