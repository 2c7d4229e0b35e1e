"""Runs the tests of a row and counts what holds. In the sandbox, in an interpreter without the model's code."""

from __future__ import annotations

import sys
import types

from gym_rm.scorers.code.guest_proxies import Connection, SolutionModule, function_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

MOST_ERRORS = 3


class Report:
    """Counts of the tests of one row: `reached` has the places of the asserts that were evaluated."""

    def __init__(self) -> None:
        self.passed = 0
        self.total = 0
        self.reached: set[int] = set()
        self.errors: list[list[str]] = []

    def count(self, error: BaseException | None = None) -> None:
        """Count a test, which passes without an error."""
        self.passed += error is None
        self.total += 1
        if error is not None:
            self.add_error(error)

    def add_error(self, error: BaseException) -> None:
        """Keep one of the first errors."""
        if len(self.errors) < MOST_ERRORS:
            self.errors.append([type(error).__name__, str(error)[:2000]])


class CountedAssert:
    """`with _gym_rm_assert(place):` counts the assert in its body, and goes on if it fails."""

    def __init__(self, report: Report, place: int) -> None:
        self.report, self.place = report, place

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.report.reached.add(self.place)
        self.report.count(error)
        return True


def run(
    serve: Callable[[str, list[Any]], Any],
    entry_point: str,
    parts: list[str],
    required: set[int],
    units: bool,
    calls: list[tuple[list[Any], Any]],
    stop_early: bool,
) -> dict[str, Any]:
    """Run the tests of a row in a namespace of their own, and return what was counted.

    An error in the first part ends the run, one in another part ends only this part. The total has every required
    assert that was not evaluated, every test of `units` that did not run, and all `calls`.
    """
    report, connection = Report(), Connection(serve)
    sys.modules["solution"] = SolutionModule(connection)
    module = sys.modules["tests"] = types.ModuleType("tests")
    module.__dict__["_gym_rm_assert"] = lambda place: CountedAssert(report, place)
    if entry_point:
        module.__dict__["candidate"] = module.__dict__[entry_point] = function_of(connection, entry_point)
    for k, source in enumerate(parts):
        try:
            exec(compile(source, "<tests>", "exec", dont_inherit=True), module.__dict__)
        except BaseException as error:
            report.add_error(error)
            if k == 0:
                break
    else:
        if units:
            run_units(module, report)
    for place, (args, expected) in enumerate(calls):
        with CountedAssert(report, place):
            result = module.__dict__["candidate"](*args)
            assert as_json(result) == as_json(expected), f"expected {expected!r:.200}, got {result!r:.200}"
        if report.errors and stop_early:
            break
    total = report.total + len(required - report.reached)
    return {"passed": report.passed, "total": total, "errors": report.errors, "unsupported": connection.unsupported}


def as_json(value: Any) -> Any:
    """Return a value as a JSON file has it, where a tuple is a list."""
    if type(value) in (list, tuple):
        return [as_json(item) for item in value]
    if type(value) is dict:
        return {str(key): as_json(item) for key, item in value.items()}
    return value


def run_units(module: types.ModuleType, report: Report) -> None:
    """Run the cases of unittest, and functions and classes of the form of pytest."""
    import unittest

    class Result(unittest.TestResult):
        """Counts each test once. What was skipped by the tests themselves is not counted, any other skip is missing."""

        def addSuccess(self, test: Any) -> None:
            report.count()

        def addExpectedFailure(self, test: Any, error: Any) -> None:
            report.count()

        def addError(self, test: Any, error: Any) -> None:
            report.add_error(error[1])

        def addFailure(self, test: Any, error: Any) -> None:
            report.add_error(error[1])

        def addSubTest(self, test: Any, subtest: Any, error: Any) -> None:
            if error is not None:
                report.add_error(error[1])

        def addUnexpectedSuccess(self, test: Any) -> None:
            report.add_error(AssertionError("unexpected success"))

        def addSkip(self, test: Any, reason: str) -> None:
            method = getattr(test, getattr(test, "_testMethodName", ""), None)
            if any(getattr(each, "__unittest_skip__", False) for each in (method, type(test))):
                self.skipped.append((test, reason))

    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    try:
        suite.addTests([unittest.FunctionTestCase(call) for call in plain_tests(module)])
    except NotImplementedError as error:
        report.add_error(error)
        return
    size, result = suite.countTestCases(), Result()
    if not size:
        report.add_error(NotImplementedError("no test was found"))
    suite.run(result)
    report.total = max(report.total, size - len(result.skipped))


def plain_tests(module: types.ModuleType) -> Iterator[Callable[[], None]]:
    """Yield the calls of the functions `test_...` of a module, and of those in its classes `Test...`."""
    import unittest

    for name, value in list(module.__dict__.items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, types.FunctionType) and name.startswith("test"):
            yield from calls_of(value, value)
        elif isinstance(value, type) and name.startswith("Test") and not issubclass(value, unittest.TestCase):
            for method, function in list(vars(value).items()):
                if isinstance(function, types.FunctionType) and method.startswith("test"):
                    yield from calls_of(function, lambda kind=value, name=method, **row: getattr(kind(), name)(**row))


def calls_of(function: types.FunctionType, call: Callable[..., Any]) -> Iterator[Callable[[], None]]:
    """Yield a call for each row of `pytest.mark.parametrize`."""
    import inspect

    rows: list[dict[str, Any]] = [{}]
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            values = [value.values if type(value).__name__ == "ParameterSet" else value for value in values]
            given = [
                value if len(names) > 1 or (type(value) is tuple and len(value) == 1) else [value] for value in values
            ]
            rows = [{**row, **dict(zip(names, value))} for row in rows for value in given]  # noqa: B905
    parameters = inspect.signature(function).parameters.values()
    needed = [each.name for each in parameters if each.default is each.empty and each.name != "self"]
    lacking = sorted(set(needed) - set(rows[0] if rows else needed))
    if lacking or inspect.iscoroutinefunction(function):
        what = f"the fixture {lacking[0]!r}" if lacking else "a plugin of pytest"
        raise NotImplementedError(f"{function.__name__} needs {what}")
    for row in rows:
        yield lambda row=row: call(**row)  # type: ignore[misc]
