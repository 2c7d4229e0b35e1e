"""Runs the tests of a row and counts what holds. In the sandbox, in an interpreter without the model's code."""

from __future__ import annotations

import os
import sys
import types

from gym_rm.scorers.code.guest_connection import Connection, SolutionModule
from gym_rm.scorers.code.guest_handles import FILE
from gym_rm.scorers.code.guest_report import BrokenTests, Report, counted
from gym_rm.scorers.code.guest_units import run_units
from gym_rm.scorers.code.guest_values import VIEWS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def run(
    serve: Callable[[bytes, bool], list[Any]],
    limit: int,
    entry_point: str,
    parts: list[str],
    undefined: list[str],
    units: bool,
    calls: list[tuple[list[Any], Any]],
    stop_early: bool,
    tolerance: float,
) -> dict[str, Any]:
    """Run the tests of a row in a namespace of their own, and return what was counted.

    An error in the first part ends the run, one in another part ends only this part. `total` is the number of unit
    tests, which is known only now.
    """
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (what tests print is nobody's output)
    connection = Connection(serve, limit, "\n".join(parts))
    report, total = Report(connection, undefined), 0
    sys.modules["solution"] = SolutionModule(connection)
    module = sys.modules["tests"] = types.ModuleType("tests")
    module.__dict__["_gym_rm_assert"] = lambda number, handled: counted(report, number, handled)
    if entry_point:
        module.__dict__["candidate"] = module.__dict__[entry_point] = connection.entry(entry_point)
    for k, source in enumerate(parts):
        try:
            exec(compiled(source), module.__dict__)
        except BaseException as error:
            report.note(error)
            if k == 0:
                break
    else:
        if units:
            total = run_units(module, report)
    for k, (args, expected) in enumerate(calls):
        with counted(report, k, False):
            result = module.__dict__["candidate"](*args)
            assert is_result(as_json(result), as_json(expected), tolerance), (
                f"expected {expected!r:.200}, got {result!r:.200}"
            )
        if report.error and stop_early:
            break
    passed = len(report.ran - report.failed)
    first = ["forbidden", "", connection.fault] if connection.fault else report.error
    return {"passed": passed, "total": total, "error": first, "unsupported": connection.unsupported}


def compiled(source: str) -> types.CodeType:
    """Return tests that this interpreter can run. Raises BrokenTests."""
    try:
        return compile(source, FILE, "exec", dont_inherit=True)
    except Exception as error:
        raise BrokenTests(f"{type(error).__name__}: {error}") from None


def is_result(value: Any, expected: Any, tolerance: float) -> bool:
    """Return whether a result is the expected one; a number that is expected as a float may differ by a tolerance."""
    if type(value) is type(expected) and type(value) in (list, dict) and len(value) == len(expected):
        if type(value) is list:
            return all(is_result(*pair, tolerance) for pair in zip(value, expected))  # noqa: B905 (Python 3.9)
        return all(key in expected and is_result(value[key], expected[key], tolerance) for key in value)
    is_near = type(expected) is float and type(value) in (int, float) and abs(value - expected) < float("inf")
    return bool(value == expected) or (is_near and abs(value - expected) <= tolerance * max(1.0, abs(expected)))


def as_json(value: Any) -> Any:
    """Return a value as a JSON file has it, where a tuple is a list."""
    if type(value).__module__ == "numpy":
        return value.tolist()
    if type(value) in (list, tuple, *VIEWS.values()):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    return value
