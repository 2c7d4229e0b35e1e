"""Runs tests in the sandbox: one interpreter for the model's code, and one for the tests.

The parent passes every call from the tests to the model's code and every result back, as plain values. Expected values
never enter the interpreter of the model's code.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gym_rm.sandbox.sandbox import Sandbox
from gym_rm.sandbox.session import SandboxReply, SandboxSession
from gym_rm.scorers.code.row_tests import RowTests
from gym_rm.scorers.code.verdicts import VERDICTS, CodeVerdict, same_output, shown

KILLED_TWICE = "the process of the code was ended from outside, and again in a second run"
FAULTS_OF_TESTS = (
    "NameError",
    "ModuleNotFoundError",
    "ImportError",
    "SyntaxError",
    "NotImplementedError",
    "CrossingError",
)
"""Names of errors of the tests themselves, unless the model's code raised one of this name."""
_VERDICT_OF_ERROR = {
    "AssertionError": "wrong_answer",
    "Failed": "wrong_answer",
    "PermissionError": "forbidden",
    "MemoryError": "memory",
}
_VERDICT_OF_STATUS = {"exit": "exception", "invalid": "forbidden"}
_MOST_OUTPUT = 1 << 16
_GUEST = """
import sys
for name, source in {sources}:
    module = sys.modules["gym_rm.scorers.code." + name] = type(sys)("gym_rm.scorers.code." + name)
    exec(compile(source, "<guest>", "exec", dont_inherit=True), module.__dict__)
"""


@functools.cache
def guest_program(*names: str) -> str:
    """Return a program that makes these files of this folder modules of a sandboxed interpreter."""
    return _GUEST.format(sources=[(name, Path(__file__).with_name(f"{name}.py").read_text()) for name in names])


SOLUTION_PROGRAM = (
    guest_program("guest_values", "guest_solution") + "_gym_rm_serve = module.SolutionServer(globals()).serve"
)
TESTS_PROGRAM = (
    guest_program("guest_values", "guest_proxies", "guest_tests")
    + "_gym_rm_run = lambda *tests: module.run(__host__, *tests)"
)


class TestRunner:
    """Runs the tests of one `score` call in sessions of a sandbox. A thread keeps its last session of tests.

    Rows with the same tests follow each other, as the replies of a group do, and share that session: the tests are
    those of one data row, and nothing of the model's code is in it.

    Args:
        sandbox: where sessions come from.
        tolerance: see `same_output`.
        stop_early: whether the first failed case ends the run, because only a pass of all counts.
    """

    __test__ = False  # not a test of pytest

    def __init__(self, sandbox: Sandbox, *, tolerance: float | None = None, stop_early: bool = False) -> None:
        self._sandbox = sandbox
        self._tolerance = tolerance
        self._stop_early = stop_early
        self._kept: dict[int, tuple[RowTests, SandboxSession]] = {}

    def close(self) -> None:
        """End the sessions of tests."""
        while self._kept:
            self._kept.popitem()[1][1].close()

    def run(self, sources: Sequence[str], tests: RowTests, end: float) -> CodeVerdict:
        """Return the verdict of the tests. A run whose process was ended from outside is repeated once.

        Args:
            sources: the model's code, to be executed one after another.
            tests: what is tested.
            end: when it must be finished, on the clock of `time.monotonic`.
        """
        run = self._cases if tests.form == "cases" else self._program
        for _ in range(2):
            try:
                return run(sources, tests, end)
            except _Killed:
                continue
        return CodeVerdict.failed(KILLED_TWICE, tests.total)

    def _program(self, sources: Sequence[str], tests: RowTests, end: float) -> CodeVerdict:
        with self._sandbox.session() as session:
            solution = _Solution(session, end)
            if failure := solution.load(sources, tests):
                return failure
            runner = self._session_of(tests, solution, end)
            try:
                arguments = [tests.entry_point, tests.parts, tests.units, tests.cases, self._stop_early]
                reply = runner.call("_gym_rm_run", arguments, host=solution.serve, deadline=end)
            except BaseException:
                runner.close()
                raise
            self._kept[threading.get_ident()] = (tests, runner)
        return dataclasses.replace(_verdict_of_run(reply, tests, solution), stdout=solution.stdout)

    def _session_of(self, tests: RowTests, solution: _Solution, end: float) -> SandboxSession:
        """Return a session for these tests, whose host is given with each request."""
        known, session = self._kept.pop(threading.get_ident(), (None, None))
        if session is not None and known is tests and session.alive:
            return session
        if session is not None:
            session.close()
        # One session may serve many rows: the time of each is limited by its deadline.
        session = self._sandbox.session(self._sandbox.limits.model_copy(update={"cpu_seconds": 24 * 3600}))
        session.execute(TESTS_PROGRAM, main=False, host=solution.serve, deadline=end)
        return session

    def _cases(self, sources: Sequence[str], tests: RowTests, end: float) -> CodeVerdict:
        passed, message, verdict, stdout = 0, "", "", ""
        limits = self._sandbox.limits
        for given, expected in tests.cases:
            large = {
                "output_bytes": max(limits.output_bytes, 2 * len(expected.encode("utf-8", "replace"))),
                "reply_bytes": max(limits.reply_bytes, 2 * len(given.encode("utf-8", "replace")) + 2**20),
            }
            with self._sandbox.session(limits.model_copy(update=large)) as session:
                reply = SandboxReply("ok")
                for source in sources:
                    reply = session.execute(source, stdin=given, deadline=end)
            if reply.status == "killed":
                raise _Killed
            stdout = stdout or reply.stdout
            ended = reply.status == "ok" or (reply.status == "exit" and reply.value == 0)
            if ended and same_output(reply.stdout, expected, self._tolerance):
                passed += 1
                continue
            if not verdict:
                stdout = reply.stdout
                difference = f"expected {shown(expected)}, got {shown(reply.stdout)}"
                verdict, message = ("wrong_answer", difference) if ended else (_verdict(reply), _message(reply))
            if self._stop_early or reply.status == "time":
                break
        return CodeVerdict(verdict or "passed", passed, tests.total, stdout, message)


class _Killed(Exception):
    """A process was ended from outside."""


class _Solution:
    """The session of the model's code, which the tests reach through `serve`.

    `fault` is the verdict if this code has ended (out of time, of memory, ...), and `message` says why; `errors` has
    the names of the exceptions that it raised.
    """

    def __init__(self, session: SandboxSession, end: float) -> None:
        self._session = session
        self._end = end
        self.fault: str | None = None
        self.message = ""
        self.errors: set[str] = set()
        self.stdout = ""

    def load(self, sources: Sequence[str], tests: RowTests) -> CodeVerdict | None:
        """Execute the model's code; return the verdict if it fails."""
        for source in [*sources, SOLUTION_PROGRAM]:
            reply = self._checked(self._session.execute(source, main=False, deadline=self._end))
            if reply.status != "ok":
                return CodeVerdict(_verdict(reply), 0, tests.total, self.stdout, _message(reply))
        return None

    def serve(self, args: list[Any]) -> SandboxReply:
        """Pass a request of the tests to the model's code. After its end, every request fails."""
        if self.fault is None:
            reply = self._checked(self._session.call("_gym_rm_serve", args, deadline=self._end))
            if reply.status == "ok" and _is_answer(reply.value):
                if not reply.value[0]:
                    self.errors.update(kind.rpartition(".")[2] for kind in reply.value[1])
                return SandboxReply("ok", reply.value)
            if reply.status == "exception":
                self.errors.add(reply.error_type)
                return SandboxReply("ok", [False, [reply.error_type, "Exception"], reply.message, ["v", None]])
            self.fault = "forbidden" if reply.status == "ok" else _verdict(reply)
            self.message = _message(reply)
        return SandboxReply("exception", None, "RuntimeError", f"the code has ended: {self.fault}")

    def _checked(self, reply: SandboxReply) -> SandboxReply:
        if reply.status == "killed":
            raise _Killed
        self.stdout = (self.stdout + reply.stdout)[:_MOST_OUTPUT]
        return reply


def _is_answer(value: Any) -> bool:
    """Return whether the model's process says that a request succeeded, or names the classes of an exception."""
    if type(value) is not list or len(value) < 2 or type(value[0]) is not bool:
        return False
    return value[0] or (type(value[1]) is list and all(type(kind) is str for kind in value[1]))


def _verdict_of_run(reply: SandboxReply, tests: RowTests, solution: _Solution) -> CodeVerdict:
    """Return the verdict of a program of tests from what it counted; no assert evaluated is not a pass."""
    if reply.status == "killed":
        raise _Killed
    log = reply.value
    if reply.status != "ok" or not isinstance(log, dict):
        if solution.fault is None and _is_fault_of_tests(reply.error_type, reply.message, solution):
            return _fault_of_tests(reply.error_type, _message(reply), tests.total)
        verdict = solution.fault or (reply.status if reply.status in VERDICTS else "exception")
        return CodeVerdict(verdict, 0, tests.total, message=solution.message or _message(reply))
    if log["unsupported"]:
        return CodeVerdict.failed(f"{log['unsupported']}, which cannot cross to its process", tests.total)
    total = max(log["total"], tests.total)
    passed = min(log["passed"], total - 1)
    if solution.fault is not None:
        return CodeVerdict(solution.fault, passed, total, message=solution.message)
    if log["error"]:
        kind, text = log["error"]
        message = f"{kind}: {text}" if text else kind
        if _is_fault_of_tests(kind, text, solution):
            return _fault_of_tests(kind, message, total)
        return CodeVerdict(_VERDICT_OF_ERROR.get(kind, "exception"), passed, total, message=message)
    if log["passed"] == log["total"] > 0:
        return CodeVerdict("passed", total, total)
    missing = log["total"] - log["passed"]
    reason = f"{missing} of the tests were not reached" if missing else "no test was reached"
    return CodeVerdict("wrong_answer", passed, total, message=reason)


def _is_fault_of_tests(kind: str, message: str, solution: _Solution) -> bool:
    """Return whether an exception that ended the tests says that the tests are wrong, and not the model's code."""
    lacks_name = kind == "ImportError" and "'solution'" in message
    return kind in FAULTS_OF_TESTS and kind not in solution.errors and not lacks_name


def _fault_of_tests(kind: str, message: str, total: int) -> CodeVerdict:
    """Return the verdict of a row whose tests are wrong."""
    hint = ". Name it in packages= if an interpreter has it." if kind == "ModuleNotFoundError" else ""
    return CodeVerdict.failed(f"the tests of the row have an error: {message}{hint}", total)


def _verdict(reply: SandboxReply) -> str:
    return _VERDICT_OF_STATUS.get(reply.status, reply.status)


def _message(reply: SandboxReply) -> str:
    if reply.status == "exit":
        return f"SystemExit: the code ended its interpreter with {reply.value!r}"
    return ": ".join(part for part in (reply.error_type, reply.message) if part)
