"""Plan batches under a token budget, run them, and assign failures to sequences. Does not import torch.

A sequence longer than the automatic budget runs in a larger batch. After a batch runs out of memory, its sequences are
planned again with half the budget. A batch that fails for another reason runs once more. If a batch fails again, only
its own sequences get an error.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from gym_rm.checks import integer
from gym_rm.engine.executors.executor import BatchResult, Executor, ModelInfo
from gym_rm.engine.token_tree import Batch, BatchPlan, IntArray, Layout, TokenSequence, plan_padded, plan_trees
from gym_rm.errors import ConfigError, logger, warn_once
from gym_rm.scores import FloatArray
from gym_rm.types import Workload

Budget: TypeAlias = int | Literal["auto"]


@dataclass(slots=True)
class RunResult:
    """Values and failures of M sequences.

    Attributes:
        values: float32 `[sum R, K]`, values of the first sequence, then of the second, and so on; NaN if it failed.
        failures: error of each failed sequence, by its index.
        workload: cost of the run.
    """

    values: FloatArray
    failures: dict[int, str] = field(default_factory=dict)
    workload: Workload = field(default_factory=Workload)


class Scheduler:
    """Plans sequences into batches of at most `budget` tokens and runs them through an executor.

    Args:
        info: properties of the executor's model.
        layout: layout of the batches.
        budget: maximum number of tokens in a batch, padding included; `"auto"` uses the budget of `info`.

    Raises:
        ConfigError: the budget is not a positive integer.
    """

    def __init__(self, info: ModelInfo, *, layout: Layout, budget: Budget = "auto") -> None:
        self.layout = layout
        self._info = info
        checked = checked_budget(budget)
        self._budget = info.max_num_batched_tokens if checked == "auto" else checked
        # The automatic budget is not a limit: longer sequences run in a larger batch of their own.
        self._limit = None if budget == "auto" else self._budget

    @property
    def budget(self) -> int:
        """Maximum number of tokens in a batch; halved after running out of memory."""
        return self._budget

    @budget.setter
    def budget(self, budget: int) -> None:
        self._budget = integer("max_num_batched_tokens", budget, minimum=1)
        self._limit = None if self._limit is None else self._budget

    def run(self, sequences: Sequence[TokenSequence], executor: Executor) -> RunResult:
        """Run M sequences and return their values; a failed batch affects only its own sequences."""
        starts = np.cumsum([0] + [len(sequence.read_positions) for sequence in sequences])
        result = RunResult(np.full((starts[-1], self._info.num_values), np.nan, dtype=np.float32))
        before = self._budget
        pending = self._first_attempts(sequences, result)
        while pending:
            rows, budget = pending.pop()
            started = time.perf_counter()
            plan = self._plan([sequences[m] for m in rows], budget)
            planned = time.perf_counter()
            outcomes = self._checked(executor.run(plan.batches), plan.batches, executor)
            broken = [b for b, outcome in enumerate(outcomes) if outcome.error and not outcome.out_of_memory]
            if broken:
                reason = outcomes[broken[0]].error
                logger.warning("%d of %d batches failed (%s); running them again", len(broken), len(outcomes), reason)
                again = [plan.batches[b] for b in broken]
                for b, outcome in zip(broken, self._checked(executor.run(again), again, executor), strict=True):
                    outcomes[b] = outcome
            result.workload += _cost(plan.batches, outcomes, planned - started, time.perf_counter() - planned)
            too_large = _collect(plan, outcomes, rows, sequences, starts, result)
            pending += self._smaller_attempts(too_large, budget, sequences, result)
        if len(result.failures) == len(sequences):
            self._budget = before  # every sequence failed, so the smaller budget did not help
        if self._budget < before:
            warn_once(
                f"out of memory with max_num_batched_tokens={before}; continuing with {self._budget}. Scores do not "
                f"change. Pass max_num_batched_tokens={self._budget} next time."
            )
        return result

    def _first_attempts(self, sequences: Sequence[TokenSequence], result: RunResult) -> list[Attempt]:
        """Return up to two attempts: sequences within the budget, and longer sequences with a larger budget."""
        short: list[int] = []
        long: list[int] = []
        for m, sequence in enumerate(sequences):
            length = len(sequence.input_ids)
            if self._limit is not None and length > self._limit:
                result.failures[m] = (
                    f"the conversation has {length} tokens, more than max_num_batched_tokens={self._limit}; raise "
                    "max_num_batched_tokens, or set max_length with overlong='drop_turns'"
                )
            else:
                (short if length <= self._budget else long).append(m)
        larger = self._budget + max((len(sequences[m].input_ids) for m in long), default=0)
        attempts = [(long, larger if self._limit is None else min(larger, self._limit)), (short, self._budget)]
        return [attempt for attempt in attempts if attempt[0]]

    def _smaller_attempts(
        self, rows: list[int], budget: int, sequences: Sequence[TokenSequence], result: RunResult
    ) -> list[Attempt]:
        """Halve the budget if needed, and return the attempts for rows that ran out of memory with `budget`."""
        if not rows:
            return []
        smaller = 0  # the batch was already larger than the budget: run every row alone
        if budget <= self._budget:
            smaller = budget // 2
            self._budget = max(1, smaller)
        short = [m for m in rows if len(sequences[m].input_ids) <= smaller]
        alone: list[Attempt] = [([m], len(sequences[m].input_ids)) for m in rows if m not in set(short)]
        return [*alone, (short, smaller)] if short else alone

    def _plan(self, sequences: Sequence[TokenSequence], budget: int) -> BatchPlan:
        longest = self._info.longest_shared
        alone = self.layout == "one_by_one" or (
            longest is not None and any(len(sequence.input_ids) > longest for sequence in sequences)
        )
        if self.layout == "tree" and not alone:
            return plan_trees(sequences, max_num_batched_tokens=budget)
        return plan_padded(sequences, max_num_batched_tokens=budget, alone=alone)

    def _checked(self, outcomes: list[BatchResult], batches: Sequence[Batch], executor: Executor) -> list[BatchResult]:
        """Return the results: each has either an error or values of the right shape and type."""
        name = f"{type(executor).__name__}.run"
        if not isinstance(outcomes, list) or len(outcomes) != len(batches):
            got = f"{len(outcomes)} results" if isinstance(outcomes, list) else type(outcomes).__name__
            reason = f"{name} must return a list of one BatchResult per batch; got {got} for {len(batches)}"
            return [BatchResult(error=reason)] * len(batches)
        checked = []
        for batch, outcome in zip(batches, outcomes, strict=True):
            if not isinstance(outcome, BatchResult):
                checked.append(BatchResult(error=f"{name} must return BatchResult; got {type(outcome).__name__}"))
                continue
            expected, values = (batch.num_reads, self._info.num_values), outcome.values
            got = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
            if outcome.error is not None:
                checked.append(replace(outcome, values=None))
            elif got != f"float32 {expected}":
                checked.append(BatchResult(error=f"{name} must return values float32 {expected}; got {got}"))
            else:
                checked.append(outcome)
        return checked


Attempt: TypeAlias = tuple[list[int], int]
"""Rows that are planned together, and their budget."""


def _collect(
    plan: BatchPlan,
    outcomes: Sequence[BatchResult],
    rows: Sequence[int],
    sequences: Sequence[TokenSequence],
    starts: IntArray,
    result: RunResult,
) -> list[int]:
    """Copy values and failures into the result; return the rows of shared batches that ran out of memory."""
    offsets = np.cumsum([0] + [batch.num_reads for batch in plan.batches])
    sizes = np.bincount(plan.batch_of, minlength=len(plan.batches))
    too_large = []
    first = 0
    for k, m in enumerate(rows):
        b = int(plan.batch_of[k])
        index = plan.value_index[first : first + len(sequences[m].read_positions)]
        first += len(index)
        outcome = outcomes[b]
        if outcome.values is not None:
            result.values[starts[m] : starts[m + 1]] = outcome.values[index - offsets[b]]
        elif outcome.out_of_memory and sizes[b] > 1:
            too_large.append(m)
        else:
            result.failures[m] = f"its batch failed: {outcome.error}"
    return too_large


def _cost(
    batches: Sequence[Batch], outcomes: Sequence[BatchResult], plan_seconds: float, run_seconds: float
) -> Workload:
    done = [batch for batch, outcome in zip(batches, outcomes, strict=True) if not outcome.out_of_memory]
    return Workload(
        unique_tokens=sum(batch.num_tokens for batch in done),
        padded_tokens=sum(batch.input_ids.size - batch.num_tokens for batch in done),
        reused_tokens=sum(outcome.reused_tokens for outcome in outcomes),
        num_batches=len(done),
        plan_seconds=plan_seconds,
        run_seconds=run_seconds,
    )


def checked_budget(budget: Any) -> Budget:
    """Return a token budget if it is valid.

    Raises:
        ConfigError: the budget is neither a positive integer nor `"auto"`.
    """
    if isinstance(budget, str) and budget == "auto":
        return "auto"
    try:
        return integer("max_num_batched_tokens", budget, minimum=1)
    except ConfigError as error:
        raise ConfigError(f"{error} Or pass 'auto'.") from None
