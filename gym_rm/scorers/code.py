"""Rewards from tests: the code of a reply runs in a sandbox, and its results are judged outside of it."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from gym_rm.checks import boolean, finite, one_of
from gym_rm.engine.text.messages import reply_text
from gym_rm.errors import ConfigError, ConversationError, brief, warn_once
from gym_rm.sandbox.limits import Limits
from gym_rm.sandbox.sandbox import Sandbox
from gym_rm.scorer import check_rows
from gym_rm.scorers.code_interpreter import CodeInterpreter
from gym_rm.scorers.code_monty import MontyTier, has_monty
from gym_rm.scorers.code_options import parse_limits, positive, worker_count
from gym_rm.scorers.code_replies import extract_code
from gym_rm.scorers.code_runs import SandboxTier
from gym_rm.scorers.code_tests import Tests, TestsError, read_tests, solution_parts
from gym_rm.scorers.code_verdicts import Outcome, clean
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Prompt, Prompts, Provenance

FIRST_TIER_SECONDS = 1.0
"""Most time of a row in the first tier if a real interpreter decides afterwards."""
SHOWN_OUTPUT = 4000
"""Characters of the output in `infos`."""


class CodeScorer:
    """`Scorer` that runs the code of the last reply against the tests of the data row.

    The tests are the fields of the row: `test` and `entry_point` (HumanEval), `test_list` (MBPP), `unit_tests` or
    `test_file` (unittest classes or test functions that import `solution`), `cases`, `test_cases` or `input_output`
    (inputs and outputs of a program, or of a function with `fn_name`). The code is the last block of the reply in
    `<code>` or in a fence (the last that defines the function, if one does), or the whole reply; it may also continue
    the function that the prompt shows.

    The verdict is computed outside of the process that runs the code, from plain values. `infos` have `verdict` (one
    of `code_verdicts.VERDICTS`, or "error" for a row without a score), `tests_passed`, `tests_total`, `stdout` and
    `message`, the first error.

    Args:
        reward: `"all"`: 1.0 if all tests pass, else 0.0; `"fraction"`: the share of the tests that pass.
        timeout: seconds for one row.
        step_timeout: seconds for one call of `score`; rows that are not finished then have no score. None: no limit.
        layer: how processes are shut in: `"bubblewrap"`, `"landlock"`, or `"auto"` for the first that this machine has;
            `"none"`: only pydantic-monty, where code that it does not support leaves a row without a score.
        allow_unsafe: with `"auto"`, use a plain process if the machine has neither.
        limits: fields of `gym_rm.sandbox.limits.Limits` to change, for example `{"memory_bytes": 2**30}`.
        num_workers: number of rows at the same time; None for the number of cores.
        interpreter: path of the Python interpreter for the code; None for one that the sandbox can read.
        packages: modules such as `["numpy"]` that this interpreter must have; code and tests can then import all
            packages that are installed for it.
        monty: whether pydantic-monty tries each row first, which takes less than a millisecond; a pass is final, and
            everything else is decided by the real interpreter. `"auto"`: if it is installed.
        execute: let replies run code during an episode: see `CodeInterpreter`, which is the `respond` of this scorer.
            Only `<code>` blocks are executed; a reply without one ends the episode.
        terminate_on_evaluation: with `execute`, whether a block that ends with an expression ends the episode.
        whole_reply: whether a reply without a block is code.
        tolerance: largest difference of numbers in the output of programs; None to compare texts only.

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
        step_timeout: float | None = None,
        layer: str = "auto",
        allow_unsafe: bool = False,
        limits: Mapping[str, Any] | Limits | None = None,
        num_workers: int | None = None,
        interpreter: str | None = None,
        packages: Sequence[str] = (),
        monty: bool | Literal["auto"] = "auto",
        execute: bool = False,
        terminate_on_evaluation: bool = False,
        whole_reply: bool = True,
        tolerance: float | None = None,
    ) -> None:
        self._options: dict[str, Any] = {name: value for name, value in locals().items() if name != "self"}
        self.reward = one_of("reward", reward, ("all", "fraction"))
        self.timeout = positive("timeout", timeout)
        self.step_timeout = None if step_timeout is None else positive("step_timeout", step_timeout)
        self.num_workers = worker_count(num_workers)
        self.packages = list(packages)
        self.whole_reply = boolean("whole_reply", whole_reply)
        self.tolerance = None if tolerance is None else finite("tolerance", tolerance)
        self.limits = parse_limits(limits, cpu_seconds=max(5, math.ceil(self.timeout)))
        one_of("monty", monty, (True, False, "auto"))
        self._monty: MontyTier | None = None
        self._sandbox: Sandbox | None = None
        self.respond: CodeInterpreter | None = None
        if monty is True or (monty == "auto" and has_monty()):
            self._monty = MontyTier(
                num_workers=self.num_workers,
                memory_bytes=min(self.limits.memory_bytes, 2**28),
                output_bytes=self.limits.output_bytes,
                tolerance=self.tolerance,
            )
        try:
            if layer != "none":
                self._sandbox = Sandbox(
                    layer=layer,
                    allow_unsafe=boolean("allow_unsafe", allow_unsafe),
                    limits=self.limits,
                    num_workers=self.num_workers,
                    interpreter=interpreter,
                    packages=packages,
                )
            elif self._monty is None or execute:
                raise ConfigError(
                    f"layer='none' needs monty=True and execute=False, got monty={monty!r} and execute={execute!r}, "
                    f"and pydantic-monty {'is' if has_monty() else 'is not'} installed."
                )
        except ConfigError as error:
            if self._monty is None or layer != "auto" or execute or interpreter is not None or packages:
                raise
            warn_once(f"only pydantic-monty runs the code of replies, which knows a part of Python: {error}")
        if boolean("execute", execute):
            self.respond = CodeInterpreter(
                sandbox=self._sandbox,
                blocks="code",
                num_workers=self.num_workers,
                terminate_on_evaluation=terminate_on_evaluation,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> CodeScorer:
        """Return the scorer itself: `gym.make_vec` deep-copies its keywords, and processes cannot be copied."""
        return self

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
        check_rows(conversations, prompts)
        given: Sequence[Prompt | None] = prompts if prompts is not None else [None] * len(conversations)
        step_end = math.inf if self.step_timeout is None else time.monotonic() + self.step_timeout
        outcomes: list[Outcome | None] = [None] * len(conversations)
        jobs: dict[tuple[str, int], tuple[str, Tests, list[int]]] = {}
        for row, (conversation, prompt) in enumerate(zip(conversations, given, strict=True)):
            prepared = self._prepare(conversation, prompt)
            if isinstance(prepared, Outcome):
                outcomes[row] = prepared
            else:
                code, tests = prepared
                jobs.setdefault((code, id(tests)), (code, tests, []))[2].append(row)
        for outcome, (_, _, rows) in zip(self._run(list(jobs.values()), step_end), jobs.values(), strict=True):
            for row in rows:
                outcomes[row] = outcome
        return self._scores([outcome for outcome in outcomes if outcome is not None])

    def close(self) -> None:
        """End all processes."""
        if self.respond is not None:
            self.respond.close()
        for each in (self._monty, self._sandbox):
            if each is not None:
                each.close()

    def _prepare(self, conversation: Conversation, prompt: Prompt | None) -> tuple[str, Tests] | Outcome:
        """Return the code and the tests of a row, or its outcome if there is nothing to run."""
        try:
            tests = read_tests(prompt)
        except TestsError as error:
            return Outcome.failed(f"{error}")
        try:
            reply = reply_text(conversation)
        except ConversationError as error:
            return Outcome.failed(str(error))
        code = extract_code(reply, name=tests.entry_point, whole_reply=self.whole_reply)
        if code is None or not code.strip():
            return Outcome("no_code", 0, tests.total, message="the reply has no code")
        try:
            code.encode()
        except UnicodeEncodeError as error:
            return Outcome("syntax_error", 0, tests.total, message=f"the code cannot be encoded: {error}"[:200])
        return code, tests

    def _run(self, jobs: list[tuple[str, Tests, list[int]]], step_end: float) -> list[Outcome]:
        if not jobs:
            return []
        real = None
        if self._sandbox is not None:
            real = SandboxTier(self._sandbox, tolerance=self.tolerance, stop_early=self.reward == "all")
        first: dict[int, int] = {}  # rows with equal tests follow each other
        places = sorted(range(len(jobs)), key=lambda k: first.setdefault(id(jobs[k][1]), k))
        found: dict[int, Outcome] = {}

        def grade(place: int) -> None:
            code, tests, _ = jobs[place]
            found[place] = self._grade(code, tests, real, step_end)

        executor = ThreadPoolExecutor(min(self.num_workers, len(jobs)), thread_name_prefix="gym_rm code")
        try:
            list(executor.map(grade, places))
        finally:
            executor.shutdown(cancel_futures=True)
            if real is not None:
                real.close()
        return [found[place] for place in range(len(jobs))]

    def _grade(self, code: str, tests: Tests, real: SandboxTier | None, step_end: float) -> Outcome:
        start = time.monotonic()
        late = f"the row was not finished within step_timeout={self.step_timeout} seconds"
        if start >= step_end:
            return Outcome.failed(late, tests.total)
        end = min(start + self.timeout, step_end)
        try:
            outcome = self._outcome(solution_parts(code, tests), tests, real, end)
        except Exception as error:  # of this package or of the machine: never a reward of the reply
            return Outcome.failed(f"the code could not be run: {brief(error)}", tests.total)
        if outcome.verdict == "time" and time.monotonic() >= step_end and step_end < start + self.timeout:
            return Outcome.failed(late, tests.total)
        return outcome

    def _outcome(self, sources: Sequence[str], tests: Tests, real: SandboxTier | None, end: float) -> Outcome:
        if self._monty is not None:
            seconds = end - time.monotonic()
            outcome, supported = self._monty.run(
                sources, tests, seconds if real is None else min(FIRST_TIER_SECONDS, seconds / 4)
            )
            if outcome.verdict == "passed":
                return outcome
            if real is None:
                if supported or outcome.error is not None:
                    return outcome
                return Outcome.failed(f"pydantic-monty does not support the code: {outcome.message}", tests.total)
        assert real is not None
        return real.run(sources, tests, end)

    def _scores(self, outcomes: Sequence[Outcome]) -> Scores:
        rewards = [math.nan if each.error is not None else self._reward(each) for each in outcomes]
        infos: dict[str, list[Any]] = {
            "verdict": [each.verdict for each in outcomes],
            "tests_passed": [each.passed for each in outcomes],
            "tests_total": [each.total for each in outcomes],
            "stdout": [clean(each.stdout[:SHOWN_OUTPUT]) for each in outcomes],
            "message": [clean(each.message[:SHOWN_OUTPUT]) for each in outcomes],
        }
        return Scores.from_rewards(
            rewards,
            errors=[each.error for each in outcomes],
            infos=infos,
            provenance=Provenance("CodeScorer", "tests", settings=self._settings()),
        ).raise_for_errors()

    def _reward(self, outcome: Outcome) -> float:
        if self.reward == "all" or outcome.verdict == "passed":
            return float(outcome.verdict == "passed")
        return min(outcome.passed, outcome.total - 1) / outcome.total

    def _settings(self) -> dict[str, Any]:
        return {
            "sandbox": None if self._sandbox is None else self._sandbox.layer,
            "monty": self._monty is not None,
            "reward": self.reward,
            "timeout": self.timeout,
            "step_timeout": self.step_timeout,
            "limits": dataclasses.asdict(self.limits),
            "tolerance": self.tolerance,
            "packages": self.packages,
        }
