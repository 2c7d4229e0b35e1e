"""Runs tests in the sandbox: one interpreter for the model's code, and one for the tests.

The parent passes the bytes of every call from the tests to the model's code, and those of every result back, without
reading them. Expected values never enter the interpreter of the model's code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gym_rm.sandbox.limits import SandboxLimits
from gym_rm.sandbox.sandbox import Sandbox
from gym_rm.sandbox.session import SandboxReply, SandboxSession
from gym_rm.sandbox.time_limit import TimeLimit
from gym_rm.scorers.code.row_cases import TestsError
from gym_rm.scorers.code.row_tests import RowTests
from gym_rm.scorers.code.verdicts import CodeVerdict, is_output, shown

KILLED_TWICE = "the process of the code was ended from outside or got no time of the machine, and again in a second run"
CASES_OF_TIMEOUT = 10
"""Cases that share the time of a row; each further one adds its part."""
_VERDICT_OF_STATUS = {"exit": "exception", "invalid": "forbidden"}
_MOST_OUTPUT = 1 << 16
_FRAME_BYTES = 1 << 12  # around an answer that a process passes on, without what was printed
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


SOLUTION_PROGRAM = guest_program("guest_values", "guest_solution")
TESTS_PROGRAM = guest_program(
    *("guest_values", "guest_handles", "guest_connection", "guest_report", "guest_units", "guest_tests")
)


def run_tests(
    sandbox: Sandbox, sources: Sequence[str], tests: RowTests, timeout: float, *, tolerance: float, stop_early: bool
) -> CodeVerdict:
    """Return the verdict of the tests. A run that was ended from outside, or that got no time, is repeated once.

    In the layer "unsafe" code can end itself that way, so that a second time is its verdict.

    Args:
        sandbox: where the sessions come from, which serve one row.
        sources: the model's code, to be executed one after another.
        tests: what is tested.
        timeout: seconds of processor time and of sleep, of the code and of its tests together, for up to ten cases;
            of one case at most. The row's own limit for each case replaces it.
        tolerance: of decimal numbers in outputs and results, if the row has none.
        stop_early: whether the first failed case ends the run, because only a pass of all counts.
    """
    tests = dataclasses.replace(tests, tolerance=tolerance if tests.tolerance is None else tests.tolerance)
    longest = max(timeout, tests.seconds or 0.0)
    run = functools.partial(_cases, longest=longest) if tests.form == "cases" else _program
    seconds = max(timeout, timeout * len(tests.cases) / CASES_OF_TIMEOUT) if tests.form == "cases" else timeout
    for _ in range(2):
        with contextlib.suppress(_Killed):
            limit = TimeLimit(tests.total * tests.seconds if tests.seconds else seconds)
            return run(sandbox, sources, tests, limit, stop_early)
    if sandbox.layer == "unsafe":  # where code can kill itself
        return CodeVerdict("forbidden", 0, tests.total, message=KILLED_TWICE)
    return CodeVerdict.failed(KILLED_TWICE, tests.total)


def _limits(sandbox: Sandbox, tests: RowTests, limit: TimeLimit, **sizes: int) -> SandboxLimits:
    """Return the limits of the sessions of a row, with its own time limit."""
    own = sandbox.limits
    cpu_seconds = max(own.cpu_seconds, math.ceil(limit.seconds)) if tests.seconds else own.cpu_seconds
    least = {name: max(getattr(own, name), size) for name, size in sizes.items()}
    return own.model_copy(update={"cpu_seconds": cpu_seconds, **least})


def _program(
    sandbox: Sandbox, sources: Sequence[str], tests: RowTests, limit: TimeLimit, stop_early: bool
) -> CodeVerdict:
    answer_bytes = sandbox.limits.reply_bytes
    frame_bytes = _FRAME_BYTES + 4 * sandbox.limits.output_bytes
    limits = _limits(sandbox, tests, limit, reply_bytes=answer_bytes + frame_bytes)
    with sandbox.session(limits) as session:
        solution = _Solution(session, limit)
        serving = f"_gym_rm_serve = module.SolutionServer(globals(), {answer_bytes}).serve"
        if failure := solution.load([*sources, SOLUTION_PROGRAM + serving], tests):
            return failure
        # Its time is that of the row.
        with sandbox.session(limits.model_copy(update={"cpu_seconds": 24 * 3600})) as runner:
            running = f"_gym_rm_run = lambda *tests: module.run(__host__, {answer_bytes}, *tests)"
            runner.execute(TESTS_PROGRAM + running, main=False, host=solution.serve, limit=limit)
            arguments = [tests.entry_point, tests.parts, tests.undefined, tests.units, tests.cases, stop_early]
            arguments += [tests.tolerance]
            reply = runner.call("_gym_rm_run", arguments, host=solution.serve, limit=limit)
    return dataclasses.replace(_verdict_of_run(reply, tests, solution), stdout=solution.stdout)


def _cases(
    sandbox: Sandbox, sources: Sequence[str], tests: RowTests, limit: TimeLimit, stop_early: bool, *, longest: float
) -> CodeVerdict:
    passed, message, verdict, stdout = 0, "", "", ""
    for given, expected in tests.cases:
        size = max(len(each.encode("utf-8", "replace")) for each in (given, expected))
        limits = _limits(sandbox, tests, limit, output_bytes=2 * size, reply_bytes=4 * size + 2**20)
        part = TimeLimit(min(longest, limit.seconds - limit.used))
        with sandbox.session(limits) as session:
            for source in sources:
                reply = session.execute(source, stdin=given, limit=part)
        limit.used += part.used
        if reply.status == "killed":
            raise _Killed
        stdout = stdout or reply.stdout
        ended = reply.status == "ok" or (reply.status == "exit" and reply.value == 0)
        if ended and _is_right(sandbox, limits, tests, (given, reply.stdout, expected), longest):
            passed += 1
            continue
        if not verdict:
            stdout = reply.stdout
            difference = f"expected {shown(expected)}, got {shown(reply.stdout)}"
            verdict, message = ("wrong_answer", difference) if ended else (_verdict(reply), _message(reply))
        if stop_early or reply.status == "time":
            break
    return CodeVerdict(verdict or "passed", passed, tests.total, stdout, message)


def _is_right(
    sandbox: Sandbox, limits: SandboxLimits, tests: RowTests, case: tuple[str, str, str], seconds: float
) -> bool:
    """Return whether the output in `(input, output, expected)` is right.

    A checker runs in a session of its own. An output for which it fails is wrong.

    Raises:
        TestsError: the checker fails also for the expected output.
    """
    given, output, expected = case
    if not tests.checker:
        return is_output(output, expected, tests.tolerance or 0.0)
    for checked in (output, expected):
        with sandbox.session(limits) as session:
            reply = session.execute(tests.checker, main=False, limit=TimeLimit(seconds))
            if reply.status == "ok":
                reply = session.call("checker", [given, checked, expected], limit=TimeLimit(seconds))
        if reply.status == "killed":
            raise _Killed
        if reply.status == "ok" and type(reply.value) in (bool, int, float) and 0 <= reply.value <= 1:
            return checked is output and reply.value == 1
    said = shown(reply.value) if reply.status == "ok" else _message(reply) or reply.status
    raise TestsError(f"the checker of the row must return True or False, got {said}")


class _Killed(Exception):
    """A process was ended from outside."""


class _Solution:
    """The session of the model's code, which the tests reach through `serve`.

    `fault` is the verdict if this code has ended (out of time, of memory, ...), and `message` says why; `was_asked`
    says whether the tests have reached it, `was_slow` whether it left them less than nine tenths of the time.
    """

    def __init__(self, session: SandboxSession, limit: TimeLimit) -> None:
        self._session = session
        self._limit = limit
        self.fault: str | None = None
        self.message = ""
        self.was_asked = False
        self.was_slow = False
        self.stdout = ""

    def load(self, sources: Sequence[str], tests: RowTests) -> CodeVerdict | None:
        """Execute the model's code; return the verdict if it fails."""
        for source in sources:
            reply = self._checked(self._session.execute(source, main=False, limit=self._limit))
            if reply.status != "ok":
                return CodeVerdict(_verdict(reply), 0, tests.total, self.stdout, _message(reply))
        self.was_slow = self._limit.used > 0.1 * self._limit.seconds
        return None

    def serve(self, args: list[Any]) -> SandboxReply:
        """Pass a request of the tests to the model's code. After its end, every request fails."""
        self.was_asked = True
        if self.fault is None:
            reply = self._checked(self._session.call("_gym_rm_serve", args, limit=self._limit))
            if reply.status == "ok" and type(reply.value) is bytes:
                return SandboxReply("ok", [reply.value, reply.stdout, reply.stderr])
            self.fault = "forbidden" if reply.status == "ok" else _verdict(reply)
            self.message = _message(reply)
        return SandboxReply("exception", None, "RuntimeError", f"the code has ended: {self.fault}")

    def _checked(self, reply: SandboxReply) -> SandboxReply:
        if reply.status == "killed":
            raise _Killed
        self.stdout = (self.stdout + reply.stdout)[:_MOST_OUTPUT]
        return reply


def _verdict_of_run(reply: SandboxReply, tests: RowTests, solution: _Solution) -> CodeVerdict:
    """Return the verdict of tests from what they counted; tests of which none was reached do not pass."""
    if reply.status == "killed":
        raise _Killed
    log = reply.value if reply.status == "ok" else {}
    total = log.get("total") or tests.total
    verdict, kind, text = log.get("error") or ("", reply.error_type, reply.message)
    message = ": ".join(part for part in (kind, text) if part)
    passed = min(log.get("passed", 0), total)
    if solution.fault is not None:
        return CodeVerdict(solution.fault, min(passed, total - 1), total, message=solution.message)
    if log.get("unsupported"):
        return CodeVerdict.failed(f"{log['unsupported']}, which cannot cross to its process", total)
    is_of_code = solution.was_asked or (reply.status == "time" and solution.was_slow)
    if verdict == "error" or (reply.status != "ok" and not is_of_code):
        hint = ". Name it in packages= if an interpreter has it." if kind == "ModuleNotFoundError" else ""
        return CodeVerdict.failed(f"the tests of the row have an error: {message}{hint}", total)
    if verdict or reply.status != "ok":
        return CodeVerdict(verdict or _verdict(reply), min(passed, total - 1), total, message=message)
    if passed and (passed == total or not tests.units):  # asserts in branches that were not taken hold
        return CodeVerdict("passed", total, total)
    return CodeVerdict("wrong_answer", passed, total, message=f"{total - passed} of the tests were not reached")


def _verdict(reply: SandboxReply) -> str:
    return _VERDICT_OF_STATUS.get(reply.status, reply.status)


def _message(reply: SandboxReply) -> str:
    if reply.status == "exit":
        return f"SystemExit: the code ended its interpreter with {shown(reply.value)}"
    return ": ".join(part for part in (reply.error_type, reply.message) if part)
