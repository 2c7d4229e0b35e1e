"""Rewards from tests: the code of a reply runs in a sandbox, and its results are judged outside of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gym_rm.checks import boolean, finite, one_of, positive
from gym_rm.config import parse_settings
from gym_rm.engine.text.judged import Judged, JudgedOptions
from gym_rm.engine.text.messages import reply_text
from gym_rm.errors import ConfigError, ConversationError, brief
from gym_rm.sandbox.sandbox import Sandbox
from gym_rm.scorer import NeverCopied, check_conversations
from gym_rm.scorers.code.interpreter import CodeInterpreter
from gym_rm.scorers.code.replies import extract_code
from gym_rm.scorers.code.row_cases import TestsError
from gym_rm.scorers.code.row_tests import RowTests, read_tests, solution_parts
from gym_rm.scorers.code.run_tests import run_tests
from gym_rm.scorers.code.verdicts import CodeVerdict, clean
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Prompt, Prompts, Provenance

SHOWN_OUTPUT = 4000
"""Characters of the output in `infos`."""


class CodeScorer(NeverCopied):
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
        self._options: dict[str, Any] = {name: value for name, value in locals().items() if name != "self"}
        self.reward = one_of("reward", reward, ("all", "fraction"))
        self.timeout = positive("timeout", timeout)
        self.tolerance = finite("tolerance", tolerance)
        if self.tolerance < 0:
            raise ConfigError(f"tolerance must be at least 0, got {tolerance!r}.")
        self.packages = list(packages)
        boolean("execute", execute)
        self._judged = parse_settings(JudgedOptions, {"judged": judged, "thinking": thinking})
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

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._settings().items())
        return f"CodeScorer({shown})"

    def __enter__(self) -> CodeScorer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Run the code of N replies against the tests of their rows, several at the same time.

        Equal code for equal tests runs once in a call.

        Raises:
            ConfigError: the arguments are not lists of one length.
            ScoringError: some rows have no score: no tests, tests that cannot be read, or a process that was ended
                from outside twice.
        """
        check_conversations(conversations, prompts)
        return self._judged.score(conversations, prompts, self._score, as_empty=True)

    def _score(self, conversations: Sequence[Conversation], prompts: Prompts) -> Scores:
        verdicts: dict[int, CodeVerdict] = {}
        jobs: dict[tuple[str, RowTests], list[int]] = {}  # rows by their code and their tests
        for row, conversation in enumerate(conversations):
            prepared = self._prepare(conversation, None if prompts is None else prompts[row])
            if isinstance(prepared, CodeVerdict):
                verdicts[row] = prepared
            else:
                jobs.setdefault(prepared, []).append(row)

        def grade(job: tuple[str, RowTests]) -> None:
            verdicts.update(dict.fromkeys(jobs[job], self._grade(*job)))

        self._sandbox.map(grade, jobs)
        return self._scores([verdicts[row] for row in range(len(conversations))])

    def close(self) -> None:
        """End all processes."""
        if self.respond is not None:
            self.respond.close()
        self._sandbox.close()

    def _prepare(self, conversation: Conversation, prompt: Prompt | None) -> tuple[str, RowTests] | CodeVerdict:
        """Return the code and the tests of a row, or its verdict if there is nothing to run."""
        try:
            tests = read_tests(prompt)
            reply = reply_text(conversation)
        except (TestsError, ConversationError) as error:
            return CodeVerdict.failed(str(error))
        code = extract_code(reply, names=tests.names)
        if code is None or not code.strip():
            return CodeVerdict("no_code", 0, tests.total, message="the reply has no code")
        return clean(code), tests

    def _grade(self, code: str, tests: RowTests) -> CodeVerdict:
        try:
            sources, stop_early = solution_parts(code, tests), self.reward == "all"
            return run_tests(
                self._sandbox, sources, tests, self.timeout, tolerance=self.tolerance, stop_early=stop_early
            )
        except TestsError as error:
            return CodeVerdict.failed(str(error), tests.total)
        except Exception as error:  # of this package or of the machine: never a reward of the reply
            return CodeVerdict.failed(f"the code could not be run: {brief(error)}", tests.total)

    def _scores(self, verdicts: Sequence[CodeVerdict]) -> Scores:
        return Scores.from_rewards(
            [math.nan if each.error is not None else self._reward(each) for each in verdicts],
            errors=[each.error for each in verdicts],
            infos={
                "verdict": [each.verdict for each in verdicts],
                "tests_passed": [each.passed for each in verdicts],
                "tests_total": [each.total for each in verdicts],
                "stdout": [clean(each.stdout[:SHOWN_OUTPUT]) for each in verdicts],
                "message": [clean(each.message[:SHOWN_OUTPUT]) for each in verdicts],
            },
            provenance=Provenance("CodeScorer", "tests", settings=self._settings()),
        ).raise_for_errors()

    def _reward(self, verdict: CodeVerdict) -> float:
        if self.reward == "all" or verdict.verdict == "passed":
            return float(verdict.verdict == "passed")
        return min(verdict.passed, verdict.total - 1) / verdict.total

    def _settings(self) -> dict[str, Any]:
        return {
            "sandbox": self._sandbox.layer,
            "reward": self.reward,
            "timeout": self.timeout,
            "tolerance": self.tolerance,
            "limits": self._sandbox.limits.model_dump(),
            "packages": self.packages,
            **self._judged.settings,
        }
