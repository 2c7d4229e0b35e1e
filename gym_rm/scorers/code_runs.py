"""The second tier: tests with real interpreters in a sandbox, one for the model's code and one for the tests.

The parent passes every call from the tests to the model's code and every result back, as plain values. Expected values
never enter the interpreter of the model's code.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from gym_rm.sandbox.sandbox import Sandbox
from gym_rm.sandbox.session import Reply, Session
from gym_rm.scorers.code_guest import BIND, SOLVER, TESTER
from gym_rm.scorers.code_tests import Tests
from gym_rm.scorers.code_verdicts import (
    VERDICTS,
    Calls,
    Outcome,
    equals,
    fault_of_tests,
    is_fault_of_tests,
    is_plain,
    outcome_of_log,
    same_output,
    shown,
)

SERVE = "_gym_rm_serve"
KILLED_TWICE = "the process of the code was ended from outside, and again in a second run"
_VERDICTS = {"exit": "exception", "invalid": "forbidden"}
_MOST_OUTPUT = 1 << 16


class SandboxTier:
    """Runs the tests of one `score` call in sessions of a sandbox. A thread keeps its last session of tests.

    Rows with the same tests follow each other, as the replies of a group do, and share that session: the tests are
    those of one data row, and nothing of the model's code is in it.

    Args:
        sandbox: where sessions come from.
        tolerance: see `same_output`.
        stop_early: whether the first failed case ends the run, because only a pass of all counts.
    """

    def __init__(self, sandbox: Sandbox, *, tolerance: float | None = None, stop_early: bool = False) -> None:
        self._sandbox = sandbox
        self._tolerance = tolerance
        self._stop_early = stop_early
        self._testers: dict[int, tuple[Tests, Session]] = {}

    def close(self) -> None:
        """End the sessions of tests."""
        while self._testers:
            self._testers.popitem()[1][1].close()

    def _tester(self, tests: Tests) -> Session:
        """Return a session for these tests, whose host is given with each request."""
        kept, session = self._testers.pop(threading.get_ident(), (None, None))
        if session is not None and kept is not tests:
            session.close()
        if session is not None and kept is tests and session.alive:
            return session
        # One session may serve many rows: the time of each is limited by its deadline.
        return self._sandbox.session(dataclasses.replace(self._sandbox.limits, cpu_seconds=24 * 3600))

    def run(self, sources: Sequence[str], tests: Tests, end: float) -> Outcome:
        """Return the outcome of the tests. A run whose process was ended from outside is repeated once.

        Args:
            sources: the model's code, to be executed one after another.
            tests: what is tested.
            end: when it must be finished, on the clock of `time.monotonic`.
        """
        for _ in range(2):
            try:
                match tests.form:
                    case "program":
                        return self._program(sources, tests, end)
                    case "calls":
                        return self._calls(sources, tests, end)
                    case _:
                        return self._cases(sources, tests, end)
            except _Killed:
                continue
        return Outcome.failed(KILLED_TWICE, tests.total)

    def _program(self, sources: Sequence[str], tests: Tests, end: float) -> Outcome:
        with self._sandbox.session() as session:
            solver = _Solver(session, end)
            failure = solver.load(sources, tests)
            if failure is not None:
                return failure
            tester = self._tester(tests)
            try:
                reply = self._tested(tester, tests, solver, end)
            except BaseException:
                tester.close()
                raise
            self._testers[threading.get_ident()] = (tests, tester)
        return _outcome_of_tester(reply, tests, solver).but(stdout=solver.stdout)

    def _tested(self, tester: Session, tests: Tests, solver: _Solver, end: float) -> Reply:
        """Return the reply with the counters of the tests."""
        bind = f"{BIND}\ncandidate = _gym_rm_function({tests.entry_point!r})\n"
        reply = tester.execute(bind, main=False, host=solver.serve, deadline=end)
        if reply.error_type == "NameError":  # a new session
            reply = tester.execute(TESTER + bind, main=False, host=solver.serve, deadline=end)
        if reply.status == "ok":
            reply = tester.execute(tests.program, main=False, result=True, host=solver.serve, deadline=end)
        return reply

    def _calls(self, sources: Sequence[str], tests: Tests, end: float) -> Outcome:
        passed, message, verdict = 0, "", ""
        with self._sandbox.session() as session:
            solver = _Solver(session, end)
            failure = solver.load(sources, tests)
            if failure is not None:
                return failure
            for case in tests.cases:
                value = solver.serve("serve", ["call", tests.entry_point, ["v", case.input], ["v", {}]], {}).value
                if solver.too_large:
                    return Outcome.failed(f"a case has too large arguments: {solver.calls.message}", tests.total)
                if value is None:
                    return Outcome(
                        solver.calls.fault or "exception", passed, tests.total, solver.stdout, solver.calls.message
                    )
                if value[0] and value[1][0] == "v" and equals(value[1][1], case.output):
                    passed += 1
                    continue
                found = f"got {shown(value[1][1])}" if value[0] else f"{value[1][0]}: {value[2]}"
                message = message or f"expected {shown(case.output)}, {found}"
                verdict = verdict or ("wrong_answer" if value[0] else "exception")
                if self._stop_early:
                    break
        return Outcome(verdict or "passed", passed, tests.total, solver.stdout, message)

    def _cases(self, sources: Sequence[str], tests: Tests, end: float) -> Outcome:
        passed, message, verdict, stdout = 0, "", "", ""
        limits = self._sandbox.limits
        for case in tests.cases:
            allowed = dataclasses.replace(
                limits,
                output_bytes=max(limits.output_bytes, 2 * len(case.output.encode("utf-8", "replace"))),
                reply_bytes=max(limits.reply_bytes, 2 * len(case.input.encode("utf-8", "replace")) + 2**20),
            )
            with self._sandbox.session(allowed) as session:
                reply = Reply("ok")
                for source in sources:
                    reply = session.execute(source, stdin=case.input, deadline=end)
            if reply.status == "killed":
                raise _Killed
            stdout = stdout or reply.stdout
            ended = reply.status == "ok" or (reply.status == "exit" and reply.value == 0)
            if ended and same_output(reply.stdout, case.output, self._tolerance):
                passed += 1
                continue
            if not verdict:
                stdout = reply.stdout
                difference = f"expected {shown(case.output)}, got {shown(reply.stdout)}"
                verdict, message = ("wrong_answer", difference) if ended else (_verdict(reply), _message(reply))
            if self._stop_early or reply.status == "time":
                break
        return Outcome(verdict or "passed", passed, tests.total, stdout, message)


class _Killed(Exception):
    """A process was ended from outside."""


class _Solver:
    """The session of the model's code, which the tests reach through `serve`."""

    def __init__(self, session: Session, end: float) -> None:
        self._session = session
        self._end = end
        self.calls = Calls()
        self.too_large = False
        self.stdout = ""

    def load(self, sources: Sequence[str], tests: Tests) -> Outcome | None:
        """Execute the model's code; return the outcome if it fails."""
        for source in [*sources, SOLVER]:
            reply = self._checked(self._session.execute(source, main=False, deadline=self._end))
            if reply.status != "ok":
                return Outcome(_verdict(reply), 0, tests.total, self.stdout, _message(reply))
        return None

    def serve(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Reply:
        """Pass a request of the tests to the model's code. After its end, every request fails."""
        if self.calls.fault is None:
            reply = self._checked(self._session.call(SERVE, args, deadline=self._end))
            if reply.status == "ok" and _is_answer(reply.value):
                if not reply.value[0]:
                    self.calls.errors.update(reply.value[1])
                return Reply("ok", reply.value)
            if reply.status == "exception":
                self.calls.errors.add(reply.error_type)
                kinds = [reply.error_type, "Exception"]
                return Reply("ok", [False, kinds, reply.message, ["v", None]])
            self.too_large = reply.status == "invalid" and self._session.alive  # the request was not sent
            self.calls.fault = "forbidden" if reply.status == "ok" else _verdict(reply)
            self.calls.message = _message(reply)
        return Reply("exception", None, "RuntimeError", f"the code has ended: {self.calls.fault}")

    def _checked(self, reply: Reply) -> Reply:
        if reply.status == "killed":
            raise _Killed
        self.stdout = (self.stdout + reply.stdout)[:_MOST_OUTPUT]
        return reply


def _is_answer(value: Any) -> bool:
    """Return whether the model's process answered in the form of `code_guest`."""
    if type(value) is not list or len(value) not in (2, 3, 4) or type(value[0]) is not bool or not is_plain(value):
        return False
    if value[0]:
        return len(value) < 4 and all(type(each) is list and len(each) > 1 for each in value[1:])
    kinds = value[1]
    return len(value) == 4 and type(kinds) is list and bool(kinds) and all(type(each) is str for each in kinds)


def _outcome_of_tester(reply: Reply, tests: Tests, solver: _Solver) -> Outcome:
    if reply.status == "killed":
        raise _Killed
    log = reply.value
    if reply.status == "ok" and isinstance(log, dict):
        if "unsupported" in log:
            return Outcome.failed(f"{log['unsupported']}, which cannot cross to its process", tests.total)
        return outcome_of_log(log, tests, solver.calls)
    if solver.calls.fault is not None:
        return Outcome(solver.calls.fault, 0, tests.total, message=solver.calls.message)
    if not is_fault_of_tests(reply.error_type, reply.message, solver.calls):
        verdict = reply.status if reply.status in VERDICTS else "exception"
        return Outcome(verdict, 0, tests.total, message=_message(reply))
    return fault_of_tests(reply.error_type, _message(reply), tests.total)


def _verdict(reply: Reply) -> str:
    return _VERDICTS.get(reply.status, reply.status)


def _message(reply: Reply) -> str:
    if reply.status == "exit":
        return f"SystemExit: the code ended its interpreter with {reply.value!r}"
    return ": ".join(part for part in (reply.error_type, reply.message) if part)
