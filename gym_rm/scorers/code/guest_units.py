"""Runs test classes and test functions as unittest and pytest do. In the sandbox."""

from __future__ import annotations

import inspect
import sys
import types

from gym_rm.scorers.code.guest_report import BrokenTests, Report

TYPE_CHECKING = False
if TYPE_CHECKING:
    import unittest
    from collections.abc import Iterator
    from typing import Any

OPTIONS = ("-q", "-c", "/dev/null", "--rootdir=/", "--capture=no", "-p", "no:cacheprovider", "-p", "no:faulthandler")
HOOKS = [f"{when}{what}" for when in ("setup_", "teardown_") for what in ("module", "function", "class", "method")]


def run_units(module: types.ModuleType, report: Report) -> int:
    """Run the tests of a module: all by pytest if it is imported already, else those of unittest and plain ones.

    Returns the number of tests that must pass: all but those that the tests themselves skip.
    """
    try:
        total = run_by_pytest(module, report) if "pytest" in sys.modules else run_by_unittest(module, report)
        if not report.ran and not report.error and not total:
            raise BrokenTests("no test was found")
    except BrokenTests as error:
        report.note(error)
        return 0
    return total


def run_by_unittest(module: types.ModuleType, report: Report) -> int:
    """Run the cases of unittest, and functions that need nothing of pytest."""
    import unittest

    class Result(unittest.TestResult):
        """Counts each test once. One that is skipped before it asks the model's code does not count."""

        def startTest(self, test: Any) -> None:
            super().startTest(test)
            self.asked = report.connection.requests

        def addSuccess(self, test: Any, err: Any = None) -> None:
            report.count(test)

        def addError(self, test: Any, err: Any) -> None:
            report.count(test, err[1])

        addExpectedFailure, addFailure = addSuccess, addError

        def addSubTest(self, test: Any, subtest: Any, error: Any) -> None:
            if error is not None:
                report.count(test, error[1])

        def addUnexpectedSuccess(self, test: Any) -> None:
            report.count(test, AssertionError("unexpected success"))

        def addSkip(self, test: Any, reason: str) -> None:
            if report.connection.requests == self.asked:
                self.skipped.append((test, reason))

    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    suite.addTests(plain_tests(module))
    size, result = suite.countTestCases(), Result()
    suite.run(result)
    return size - len({test for test, _ in result.skipped} - report.ran)


def plain_tests(module: types.ModuleType) -> Iterator[unittest.TestCase]:
    """Yield the test functions of a module and of its classes. Raises BrokenTests for those that need pytest."""
    import unittest

    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, types.FunctionType) and name.startswith("test"):
            needs_no_pytest(value, vars(module))
            yield unittest.FunctionTestCase(value)
        if not isinstance(value, type) or not name.startswith("Test") or issubclass(value, unittest.TestCase):
            continue
        for method in [each for each in dir(value) if each.startswith("test") and value.__dict__.get("__test__", True)]:
            needs_no_pytest(getattr(value, method), {*vars(module), *dir(value)})
            yield unittest.FunctionTestCase(lambda kind=value, name=method: getattr(kind(), name)())  # type: ignore[misc]


def needs_no_pytest(function: Any, names: Any) -> None:
    """Raise BrokenTests for a test function that only pytest runs; `names` are those beside it."""
    parameters = list(inspect.signature(function).parameters.values())
    is_method = parameters[:1] and parameters[0].name == "self"
    needs = [each.name for each in parameters[bool(is_method) :] if each.default is each.empty]
    needs += [each for each in [*HOOKS, "setUpModule", "tearDownModule"] if each in names]
    if needs or inspect.iscoroutinefunction(function):
        reason = f"has {needs[0]!r}" if needs else "is a coroutine"
        raise BrokenTests(
            f"{function.__name__} {reason}, which pytest runs: install pytest and name it in packages=['pytest']"
        )


def run_by_pytest(module: types.ModuleType, report: Report) -> int:
    """Run all tests by pytest, from a module that is no file."""
    import pathlib
    import unittest

    import pytest
    from _pytest.fixtures import FixtureLookupError

    class Tests(pytest.Module):
        """The module of the tests."""

        def _getobj(self) -> types.ModuleType:
            return module

    class Plugin:
        """Collects from this module, and counts."""

        required = 0
        asked = 0

        def pytest_runtest_logstart(self) -> None:
            self.asked = report.connection.requests

        def pytest_collection(self, session: Any) -> bool:
            tests = Tests.from_parent(session, path=pathlib.Path("/tests.py"))
            session.items = list(session.genitems(tests))
            session.testscollected = self.required = len(session.items)
            for item in session.items:
                if {"tmp_path", "tmpdir", "capfd"} & {*getattr(item, "fixturenames", ())}:
                    raise BrokenTests(f"{item.name} needs files, which the sandbox does not have")
                is_method_of_unittest = item.cls is not None and issubclass(item.cls, unittest.TestCase)
                if inspect.iscoroutinefunction(item.obj) and not is_method_of_unittest:
                    raise BrokenTests(f"{item.name} is a coroutine; write an unittest.IsolatedAsyncioTestCase")
            return True

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
            outcome = yield
            if outcome.skipped and not hasattr(outcome, "wasxfail"):
                self.required -= report.connection.requests == self.asked
            elif outcome.failed and call.excinfo is not None and isinstance(call.excinfo.value, FixtureLookupError):
                report.note(BrokenTests(f"{item.name} needs a fixture that does not exist"))
            elif outcome.failed or (is_raised_by_code(call) and not item.get_closest_marker("xfail")):
                error = AssertionError(str(outcome.longrepr)) if call.excinfo is None else call.excinfo.value
                report.count(item.nodeid, error)
            elif call.when == "call" and (outcome.passed or hasattr(outcome, "wasxfail")):
                report.count(item.nodeid)
            return outcome

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                raise BrokenTests(str(report.longrepr))

        def pytest_internalerror(self, excinfo: Any) -> bool:
            report.note(excinfo.value)
            return True

    def is_raised_by_code(call: Any) -> bool:  # such as pytest.xfail, which is for tests alone
        return call.excinfo is not None and "_gym_rm_raised" in vars(call.excinfo.value)

    plugin = Plugin()
    pytest.main([*OPTIONS], plugins=[plugin])
    return plugin.required
