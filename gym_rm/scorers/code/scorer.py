"""Rewards from tests: the code of a reply runs in a sandbox, and its results are judged outside of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gym_rm.checks import boolean, finite, one_of, positive
from gym_rm.engine.text.judged import Judged
from gym_rm.errors import ConfigError, brief
from gym_rm.sandbox.sandbox import Sandbox
from gym_rm.scorer import CALLS_THAT_WAIT
from gym_rm.scorers.code.interpreter import CodeInterpreter
from gym_rm.scorers.code.replies import extract_code
from gym_rm.scorers.code.row_cases import TestsError
from gym_rm.scorers.code.row_tests import RowTests, read_tests, solution_parts
from gym_rm.scorers.code.run_tests import run_tests
from gym_rm.scorers.code.verdicts import CodeVerdict, clean
from gym_rm.scorers.reply_scorer import Grade, ReplyScorer
from gym_rm.types import Prompt

SHOWN_OUTPUT = 4000
"""Characters of the output in `infos`."""


class CodeScorer(ReplyScorer):
    """`Scorer` that runs the code of the last reply against the tests of the data row.

    The tests are the fields of the row: `test` and `entry_point` (HumanEval), `test_list` (MBPP), `unit_tests` or
    `test_file` (unittest classes or test functions that import `solution`), `cases`, `test_cases` or `input_output`
    (inputs and outputs of a program, or of a function with `fn_name`), or those of the data sets that the page of
    `Code-v0` lists. Of the blocks of the reply in `<code>` or in a fence, the solution is the last that defines what
    the tests need, or that reads the input and prints, with the blocks that define what it uses. The reply may also be
    code alone, or continue the function that the prompt shows.

    The verdict is computed outside of the process that runs the code, from plain values. `infos` have `verdict` (one
    of `verdicts.VERDICTS`, or "error" for a row without a score), `tests_passed`, `tests_total`, `stdout` and
    `message`, the first error.

    Args:
        reward: `"all"`: 1.0 if all tests pass, else 0.0; `"fraction"`: the share of the cases that pass. A case is a
            test function or method (of pytest, with its parameters), an assert statement of other tests, however often
            it is evaluated, or an input with its output.
        timeout: seconds for one row, of processor time and of sleep. Waiting for a busy or stopped machine does not
            count; a row that gets no time at all has no score. Of a program's cases the first ten share this time, and
            each further one adds a tenth; none has more. `time_limit` of a row, the seconds of a case, replaces it.
        tolerance: largest difference, absolute or relative, of a number that a program prints where the expected output
            has a decimal point or an exponent, or that a function returns where a float is expected. Integers and other
            texts must be equal. `tolerance` of a row replaces it.
        layer, allow_unsafe, num_workers, interpreter, packages: see `Sandbox`. As many rows run at the same time as
            there are workers.
        limits: fields of `SandboxLimits` to change, for example `{"memory_bytes": 2**30}`.
        execute: let replies run code during an episode: see `CodeInterpreter`, which is the `respond` of this scorer.
            Only `<code>` blocks are executed; a reply without one ends the episode.
        judged, thinking: fields of `JudgedOptions`. A reply whose thinking has not ended has no code.

    Raises:
        ConfigError: an option is invalid, or the machine can run no code safely.

    Example:
        >>> prompt = Prompt(({"role": "user", "content": "Write double(x)."},), "p", metadata={
        ...     "test_list": ["assert double(2) == 4", "assert double(0) == 0"]})
        >>> reply = {"role": "assistant", "content": "```python\\ndef double(x):\\n    return x + 2\\n```"}
        >>> with CodeScorer(reward="fraction", allow_unsafe=True) as scorer:
        ...     scores = scorer.score([[*prompt.messages, reply]], [prompt])
        >>> scores.rewards.tolist(), scores.infos["verdict"].tolist()
        ([0.5], ['wrong_answer'])
    """

    model = "tests"
    max_concurrent_calls = CALLS_THAT_WAIT

    def __init__(
        self,
        *,
        reward: Literal["all", "fraction"] = "all",
        timeout: float = 10.0,
        tolerance: float = 1e-6,
        layer: str = "auto",
        allow_unsafe: bool = False,
        limits: Mapping[str, Any] | None = None,
        num_workers: int | None = None,
        interpreter: str | None = None,
        packages: Sequence[str] = (),
        execute: bool = False,
        judged: Judged = "answer",
        thinking: Any = None,
    ) -> None:
        self._options = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(judged=judged, thinking=thinking)
        self.reward = one_of("reward", reward, ("all", "fraction"))
        self.timeout = positive("timeout", timeout)
        self.tolerance = finite("tolerance", tolerance)
        if self.tolerance < 0:
            raise ConfigError(f"tolerance must be at least 0, got {tolerance!r}.")
        self.packages = list(packages)
        boolean("execute", execute)
        self._sandbox = Sandbox(
            layer=layer,
            allow_unsafe=boolean("allow_unsafe", allow_unsafe),
            limits={"cpu_seconds": max(5, math.ceil(self.timeout)), **(limits or {})},
            num_workers=num_workers,
            interpreter=interpreter,
            packages=packages,
        )
        self.respond = CodeInterpreter(sandbox=self._sandbox, thinking=thinking) if execute else None

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(CodeScorer, **self._options), ()

    def __enter__(self) -> CodeScorer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def grades(self, replies: Sequence[tuple[str, Prompt | None]]) -> Sequence[Grade]:
        """Run the code of replies against the tests of their rows; equal code for equal tests runs once in a call."""
        prepared = [self._prepare(*each) for each in replies]
        jobs = list(dict.fromkeys(each for each in prepared if not isinstance(each, CodeVerdict)))
        verdicts = dict(zip(jobs, self._sandbox.map(self._run, jobs), strict=True))
        return [self._grade(each if isinstance(each, CodeVerdict) else verdicts[each]) for each in prepared]

    def unread(self, error: str) -> Grade:
        """Return the grade of a conversation that does not end with a reply in text."""
        return self._grade(CodeVerdict.failed(error))

    def close(self) -> None:
        """End all processes."""
        if self.respond is not None:
            self.respond.close()
        self._sandbox.close()

    def _prepare(self, reply: str, prompt: Prompt | None) -> tuple[str, RowTests] | CodeVerdict:
        """Return the code and the tests of a row, or its verdict if there is nothing to run."""
        try:
            tests = read_tests(prompt)
        except TestsError as error:
            return CodeVerdict.failed(str(error))
        code = extract_code(reply, names=tests.names)
        if code is None or not code.strip():
            return CodeVerdict("no_code", 0, tests.total, message="the reply has no code")
        return clean(code), tests

    def _run(self, job: tuple[str, RowTests]) -> CodeVerdict:
        """Return the verdict of code on its tests."""
        code, tests = job
        try:
            sources, stop_early = solution_parts(code, tests), self.reward == "all"
            return run_tests(
                self._sandbox, sources, tests, self.timeout, tolerance=self.tolerance, stop_early=stop_early
            )
        except TestsError as error:
            return CodeVerdict.failed(str(error), tests.total)
        except Exception as error:  # of this package or of the machine: never a reward of the reply
            return CodeVerdict.failed(f"the code could not be run: {brief(error)}", tests.total)

    def _grade(self, verdict: CodeVerdict) -> Grade:
        """Return the reward and the infos of a verdict."""
        share = 1.0 if verdict.verdict == "passed" else 0.0
        if self.reward == "fraction" and not share and verdict.total:
            share = min(verdict.passed, verdict.total - 1) / verdict.total
        infos = {
            "verdict": verdict.verdict,
            "tests_passed": verdict.passed,
            "tests_total": verdict.total,
            "stdout": clean(verdict.stdout[:SHOWN_OUTPUT]),
            "message": clean(verdict.message[:SHOWN_OUTPUT]),
        }
        return Grade(math.nan if verdict.error is not None else share, verdict.error, infos)

    @property
    def settings(self) -> dict[str, Any]:
        """The options that decide about verdicts."""
        own = {name: getattr(self, name) for name in ("reward", "timeout", "tolerance", "packages")}
        limits = self._sandbox.limits.model_dump()
        return {"sandbox": self._sandbox.layer, **own, "limits": limits, **self._judged.settings}
