"""Runs the tests of a row and counts what holds. In the sandbox, in an interpreter without the model's code."""

from __future__ import annotations

import sys
import types

from gym_rm.scorers.code.guest_proxies import Connection, SolutionModule, function_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


class Report:
    """Counts of the tests of one row, and the first error: the name of its class, and its message."""

    def __init__(self) -> None:
        self.passed = 0
        self.total = 0
        self.error: list[str] = []

    def count(self, error: BaseException | None = None) -> None:
        """Count a test, which passes without an error."""
        self.passed += error is None
        self.total += 1
        if error is not None:
            self.note(error)

    def note(self, error: BaseException) -> None:
        """Keep the first error."""
        self.error = self.error or [type(error).__name__, str(error)[:2000]]

    def __enter__(self) -> None:
        """Begin an assert."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Count the assert that ends here, and go on if it fails."""
        self.count(error)
        return True


def run(
    serve: Callable[..., Any],
    entry_point: str,
    parts: list[str],
    units: bool,
    calls: list[tuple[list[Any], Any]],
    stop_early: bool,
) -> dict[str, Any]:
    """Run the tests of a row in a namespace of their own, and return what was counted.

    An error in the first part ends the run, one in another part ends only this part. Tests of `units` that did not run
    are part of the total.
    """
    report, connection = Report(), Connection(serve)
    sys.modules["solution"] = SolutionModule(connection)
    module = sys.modules["tests"] = types.ModuleType("tests")
    module.__dict__["_gym_rm_assert"] = report
    if entry_point:
        module.__dict__["candidate"] = module.__dict__[entry_point] = function_of(connection, entry_point)
    for k, source in enumerate(parts):
        try:
            exec(compile(source, "<tests>", "exec", dont_inherit=True), module.__dict__)
        except BaseException as error:
            report.note(error)
            if k == 0:
                break
    else:
        if units:
            run_units(module, report)
    for args, expected in calls:
        with report:
            result = module.__dict__["candidate"](*args)
            assert as_json(result) == as_json(expected), f"expected {expected!r:.200}, got {result!r:.200}"
        if report.error and stop_early:
            break
    return {
        "passed": report.passed,
        "total": report.total,
        "error": report.error,
        "unsupported": connection.unsupported,
    }


def as_json(value: Any) -> Any:
    """Return a value as a JSON file has it, where a tuple is a list."""
    if type(value) in (list, tuple):
        return [as_json(item) for item in value]
    if type(value) is dict:
        return {str(key): as_json(item) for key, item in value.items()}
    return value


def run_units(module: types.ModuleType, report: Report) -> None:
    """Run the cases of unittest, and plain functions and classes whose names begin with `test`."""
    import unittest

    class Result(unittest.TestResult):
        """Counts each test once. What was skipped by the tests themselves is not counted, any other skip is missing."""

        def addSuccess(self, test: Any) -> None:
            report.count()

        def addExpectedFailure(self, test: Any, error: Any) -> None:
            report.count()

        def addError(self, test: Any, error: Any) -> None:
            report.note(error[1])

        def addFailure(self, test: Any, error: Any) -> None:
            report.note(error[1])

        def addSubTest(self, test: Any, subtest: Any, error: Any) -> None:
            if error is not None:
                report.note(error[1])

        def addUnexpectedSuccess(self, test: Any) -> None:
            report.note(AssertionError("unexpected success"))

        def addSkip(self, test: Any, reason: str) -> None:
            method = getattr(test, getattr(test, "_testMethodName", ""), None)
            if any(getattr(each, "__unittest_skip__", False) for each in (method, type(test))):
                self.skipped.append((test, reason))

    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    try:
        suite.addTests([unittest.FunctionTestCase(call) for call in plain_tests(module)])
    except NotImplementedError as error:
        report.note(error)
        return
    size, result = suite.countTestCases(), Result()
    if not size:
        report.note(NotImplementedError("no test was found"))
    suite.run(result)
    report.total = max(report.total, size - len(result.skipped))


def plain_tests(module: types.ModuleType) -> Iterator[Callable[[], None]]:
    """Yield the functions `test_...` of a module, and the calls of those in its classes `Test...`."""
    import inspect
    import unittest

    for name, value in list(module.__dict__.items()):
        if getattr(value, "__module__", None) != module.__name__ or not name.lower().startswith("test"):
            continue
        is_plain_class = isinstance(value, type) and not issubclass(value, unittest.TestCase)
        for method, function in list(vars(value).items()) if is_plain_class else [("", value)]:
            if not isinstance(function, types.FunctionType) or (method and not method.startswith("test")):
                continue
            parameters = inspect.signature(function).parameters.values()
            if any(each.default is each.empty for each in list(parameters)[bool(method) :]):
                raise NotImplementedError(f"{function.__name__} has parameters; write a test for each of their values")
            if inspect.iscoroutinefunction(function):
                raise NotImplementedError(f"{function.__name__} is a coroutine, which these tests cannot await")
            yield (lambda kind=value, name=method: getattr(kind(), name)()) if method else function  # type: ignore[misc]
