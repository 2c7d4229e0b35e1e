"""The first tier: tests in pydantic-monty, an interpreter of a part of Python that has no system calls.

A pass is final. Everything else may be a limit of this interpreter, so that a real one decides.
"""

from __future__ import annotations

import importlib.util
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from gym_rm.errors import ConfigError
from gym_rm.scorers.code_tests import Tests
from gym_rm.scorers.code_verdicts import Calls, Outcome, equals, is_plain, outcome_of_log, same_output, shown

INSTALL = "pip install 'gym-rm[code]'"
_UNSUPPORTED = ("NotImplementedError", "ModuleNotFoundError", "ImportError", "NameError", "AttributeError", "TypeError")
MOST_KEYS = 2000
"""Keys of a result: many with one hash take quadratic time where Python builds the dict, and nothing ends that."""
MOST_ITEMS = 200_000
_CALL = "{check} = {name}(*_gym_rm_args, **_gym_rm_kwargs)\n{check}_(({check},))\n{check}"
# Its name is drawn for each session, and it holds the builtins, so that the model's code cannot replace it.
_CHECK = f"""
def {{check}}_(value, isinstance=isinstance, len=len, keyed=(dict, set, frozenset), dict=dict, group=(list, tuple),
               atoms=(type(None), int, float, str, bytes)):
    keys = items = 0
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, keyed):
            keys += len(each)
        elif not isinstance(each, group):
            if not isinstance(each, atoms):  # it would cross as its text
                raise NotImplementedError("a result of this type")
            continue
        items += len(each)
        if keys > {MOST_KEYS} or items > {MOST_ITEMS}:
            raise NotImplementedError("a result of this size")
        todo.extend(each)
        if isinstance(each, dict):
            todo.extend(each.values())
def input(prompt="", lines=_gym_rm_lines):
    if not lines:
        raise EOFError("EOF when reading a line")
    return lines.pop()
"""


def has_monty() -> bool:
    """Return whether pydantic-monty is installed."""
    return importlib.util.find_spec("pydantic_monty") is not None


class MontyTier:
    """Runs tests in pairs of sessions of pydantic-monty: one has the model's code, the other one the tests.

    Args:
        num_workers: number of rows at the same time; each needs two processes.
        memory_bytes: limit of the memory of each session.
        output_bytes: limit of what the model's code prints.
        tolerance: see `same_output`.
    """

    def __init__(
        self, *, num_workers: int, memory_bytes: int, output_bytes: int, tolerance: float | None = None
    ) -> None:
        if not has_monty():
            raise ConfigError(f"monty=True needs pydantic-monty; install it: {INSTALL}.")
        self._num_workers = num_workers
        self._memory_bytes = memory_bytes
        self._output_bytes = output_bytes
        self._tolerance = tolerance
        self._lock = threading.Lock()
        self._pool: Any = None

    def run(self, sources: Sequence[str], tests: Tests, seconds: float) -> tuple[Outcome, bool]:
        """Return the outcome, and whether this interpreter supports all that the code and the tests use.

        Args:
            sources: the model's code, to be executed one after another.
            tests: what is tested.
            seconds: limit of the whole run.
        """
        import pydantic_monty

        deadline = time.monotonic() + seconds
        run = _Run(self._open(), self._memory_bytes, self._output_bytes, deadline)
        try:
            match tests.form:
                case "program":
                    return self._program(run, sources, tests)
                case "calls":
                    return self._calls(run, sources, tests)
                case _:
                    return self._cases(run, sources, tests)
        except pydantic_monty.MontyCrashedError as error:
            if error.timed_out:
                return Outcome("time", 0, tests.total, run.stdout, "out of time"), True
            return Outcome.failed(f"a worker of pydantic-monty ended: {error}", tests.total), False
        except _OutOfTime:
            return Outcome("time", 0, tests.total, run.stdout, "out of time"), True
        except pydantic_monty.MontyError as error:
            return _failure(error, tests, run.stdout)

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            self._finalizer()

    def _open(self) -> Any:
        with self._lock:
            if self._pool is None:
                import pydantic_monty

                self._pool = pydantic_monty.Monty(
                    min_processes=1, max_processes=2 * self._num_workers, max_checkouts_per_worker=1000
                )
                self._pool.__enter__()
                self._finalizer = weakref.finalize(self, self._pool.__exit__, None, None, None)
            return self._pool

    def _program(self, run: _Run, sources: Sequence[str], tests: Tests) -> tuple[Outcome, bool]:
        if tests.solution:  # a module of the model's classes and functions needs a real interpreter
            return Outcome("exception", 0, tests.total), False
        with run.session() as solver, run.session() as tester:
            candidate = run.load(solver, sources, tests.entry_point)
            log = run.feed(tester, tests.program, {"candidate": candidate})
        if run.unsupported:
            return run.outcome("exception", 0, tests, run.unsupported)
        outcome = outcome_of_log(log, tests, run.calls).but(stdout=run.stdout)
        return outcome, outcome.error is None

    def _calls(self, run: _Run, sources: Sequence[str], tests: Tests) -> tuple[Outcome, bool]:
        import pydantic_monty

        passed, message = 0, ""
        with run.session() as solver:
            candidate = run.load(solver, sources, tests.entry_point)
            for case in tests.cases:
                try:
                    found = candidate(*case.input)
                except (_OutOfTime, pydantic_monty.MontyError):
                    raise
                except Exception as error:  # of the model's code
                    found = f"{type(error).__name__}: {error}"
                    return run.outcome("exception", passed, tests, f"expected {shown(case.output)}, got {found:.200}")
                passed += (right := equals(found, case.output))
                message = message or ("" if right else f"expected {shown(case.output)}, got {shown(found)}")
        verdict = "passed" if passed == len(tests.cases) else "wrong_answer"
        return Outcome(verdict, passed, tests.total, run.stdout, message), True

    def _cases(self, run: _Run, sources: Sequence[str], tests: Tests) -> tuple[Outcome, bool]:
        passed, message = 0, ""
        for case in tests.cases:
            run.start_output()
            with run.session() as solver:
                run.load(solver, sources, lines=case.input.splitlines())
            passed += (right := same_output(run.stdout, case.output, self._tolerance))
            message = message or ("" if right else f"expected {shown(case.output)}, got {shown(run.stdout)}")
        verdict = "passed" if passed == len(tests.cases) else "wrong_answer"
        return Outcome(verdict, passed, tests.total, run.stdout, message), True


class _OutOfTime(Exception):
    """The whole run took too long."""


class _Run:
    """One run of the tests: its sessions, its deadline, its output."""

    def __init__(self, pool: Any, memory_bytes: int, output_bytes: int, deadline: float) -> None:
        self._pool = pool
        self._limits = {
            "max_memory": memory_bytes,
            "max_suspensions": 1_000_000,
            "max_total_sleep_secs": 0.0,
        }
        self._output_bytes = output_bytes
        self._deadline = deadline
        self.calls = Calls()
        self.unsupported = ""
        self.start_output()

    @property
    def stdout(self) -> str:
        """What the model's code printed."""
        return "".join(text for stream, text in self._output.output if stream == "stdout")

    def outcome(self, verdict: str, passed: int, tests: Tests, message: str) -> tuple[Outcome, bool]:
        """Return the outcome of a run with an error, and whether all that it used is supported."""
        verdict = self.calls.fault or verdict
        return Outcome(verdict, passed, tests.total, self.stdout, self.unsupported or message), not self.unsupported

    def start_output(self) -> None:
        """Forget what was printed."""
        import pydantic_monty

        self._output = pydantic_monty.CollectStreams(self._output_bytes)

    def session(self) -> Any:
        """Return a new session, to be entered."""
        left = max(self._deadline - time.monotonic(), 0.001)
        return self._pool.checkout(limits={**self._limits, "max_feed_duration_secs": left})

    def feed(self, session: Any, source: str, lookup: dict[str, Any] | None = None, **inputs: Any) -> Any:
        """Execute a source and return the value of its last expression."""
        if time.monotonic() > self._deadline:
            raise _OutOfTime
        return session.feed_run(source, external_lookup=lookup, inputs=inputs, print_callback=self._output)

    def load(
        self, solver: Any, sources: Sequence[str], name: str = "", lines: Sequence[str] = ()
    ) -> Callable[..., Any]:
        """Execute the model's code; return a function that calls its function and returns the plain result."""
        import pydantic_monty

        check = f"_gym_rm_{secrets.token_hex(8)}"
        self.feed(solver, _CHECK.format(check=check), _gym_rm_lines=list(reversed(lines)))
        for source in sources:
            self.feed(solver, f"{source}\nNone")  # no value of the code
        source = _CALL.format(name=name, check=check)

        def candidate(*args: Any, **kwargs: Any) -> Any:
            try:
                value = self.feed(solver, source, _gym_rm_args=list(args), _gym_rm_kwargs=kwargs)
            except (_OutOfTime, pydantic_monty.MontyCrashedError) as error:  # the tests may catch it
                if getattr(error, "timed_out", True):
                    self.calls.fault = self.calls.fault or "time"
                    self.calls.message = self.calls.message or "out of time"
                else:
                    self.unsupported = self.unsupported or str(error)
                raise
            except pydantic_monty.MontyRuntimeError as error:
                inner = error.exception()
                name = type(inner).__name__
                self.calls.errors.add(name)
                if name in ("TimeoutError", "MemoryError"):
                    self.calls.fault = self.calls.fault or ("time" if name == "TimeoutError" else "memory")
                if name in _UNSUPPORTED:
                    self.unsupported = self.unsupported or f"{name}: {inner}"
                raise inner from None
            if not is_plain(value):
                self.unsupported = self.unsupported or f"a result of the type {type(value).__name__}"
                raise TypeError("the result is not a plain value")
            return value

        return candidate


def _failure(error: Any, tests: Tests, stdout: str) -> tuple[Outcome, bool]:
    """Return the outcome of a run that ended with an exception, and whether the interpreter supports its code."""
    inner = error.exception()
    name = type(inner).__name__
    message = f"{name}: {inner}"[:2000]
    if type(error).__name__ == "MontySyntaxError":
        return Outcome("syntax_error", 0, tests.total, stdout, message), "not yet support" not in message
    verdict = {"TimeoutError": "time", "MemoryError": "memory"}.get(name, "exception")
    return Outcome(verdict, 0, tests.total, stdout, message), name not in _UNSUPPORTED
