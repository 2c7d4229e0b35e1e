"""Plan batches under a token budget, run them, and assign failures to sequences. Does not import torch.

A sequence longer than the automatic budget runs in a larger batch. After a batch runs out of memory, its sequences are
planned again with half the budget. After a batch fails for another reason, each of its sequences runs alone. So do
sequences whose values are not finite, because a NaN can come from another sequence of the batch. Only a sequence that
fails alone gets an error.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from gym_rm.engine.batch_planning import plan_layout
from gym_rm.engine.executors.executor import BatchResult, Executor, ModelInfo
from gym_rm.engine.token_tree import Batch, BatchPlan, IntArray, Layout, TokenSequence
from gym_rm.errors import RowError, logger, warn_once
from gym_rm.scores import FloatArray
from gym_rm.types import Workload

Budget: TypeAlias = int | Literal["auto"]

BATCH_TOKENS = 32  # cost of a batch besides its tokens, as a number of tokens, when batches are cut for replicas


@dataclass(frozen=True, slots=True)
class Attempt:
    """Sequences that are planned together.

    Attributes:
        rows: indices of the sequences.
        budget: token budget of their batches.
        alone: whether each sequence gets a batch of its own, as a last attempt.
    """

    rows: list[int]
    budget: int
    alone: bool = False


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

    Attributes:
        budget: maximum number of tokens in a batch; halved after running out of memory.
    """

    def __init__(self, info: ModelInfo, *, layout: Layout, budget: Budget = "auto") -> None:
        self.layout = layout
        self._info = info
        # The automatic budget is not a limit: longer sequences run in a larger batch of their own.
        self._limit = None if budget == "auto" else budget
        self.budget = info.max_num_batched_tokens if budget == "auto" else budget

    def run(self, sequences: Sequence[TokenSequence], executor: Executor) -> RunResult:
        """Run M sequences and return their values; a failed batch affects only its own sequences."""
        starts = np.cumsum([0] + [len(sequence.read_positions) for sequence in sequences])
        result = RunResult(np.full((starts[-1], self._info.num_values), np.nan, dtype=np.float32))
        before = self.budget
        pending = self._first_attempts(sequences, result)
        while pending:
            attempt = pending.pop()
            rows = attempt.rows
            started = time.perf_counter()
            plan = self._plan([sequences[m] for m in rows], attempt.budget, attempt.alone)
            planned = time.perf_counter()
            outcomes = executor.run(plan.batches)
            for b, (batch, outcome) in enumerate(zip(plan.batches, outcomes, strict=True)):
                shape = batch.num_reads, self._info.num_values
                if outcome.values is not None and outcome.values.shape != shape:  # as of a replaced head
                    reason = f"the model must return values of the shape {shape}, got {outcome.values.shape}"
                    outcomes[b] = BatchResult(error=reason)
            result.workload += _cost(plan.batches, outcomes, planned - started, time.perf_counter() - planned)
            too_large, broken = _collect(plan, outcomes, attempt, sequences, starts, result)
            if broken:
                reason = next((outcome.error for outcome in outcomes if outcome.error), "values that are not finite")
                logger.warning("%d of %d sequences failed (%s); running each alone", len(broken), len(rows), reason)
                pending.append(Attempt(broken, max(len(sequences[m].input_ids) for m in broken), alone=True))
            pending += self._smaller_attempts(too_large, attempt.budget, sequences)
        if self.budget < before and len(result.failures) == len(sequences):
            self.budget = before  # less memory would not have helped
        elif self.budget < before:
            warn_once(
                f"out of memory with max_num_batched_tokens={before}; continuing with {self.budget}. Scores do not "
                f"change. Pass max_num_batched_tokens={self.budget} if this happens again."
            )
        return result

    def _first_attempts(self, sequences: Sequence[TokenSequence], result: RunResult) -> list[Attempt]:
        """Return attempts: sequences within the budget, longer ones with a larger budget, and those that run alone."""
        short: list[int] = []
        long: list[int] = []
        apart: list[int] = []
        for m, sequence in enumerate(sequences):
            length = len(sequence.input_ids)
            if self._limit is not None and length > self._limit:
                result.failures[m] = RowError(
                    f"the conversation has {length} tokens, more than max_num_batched_tokens={self._limit}; raise "
                    "max_num_batched_tokens, or set max_length with overlong='drop_turns'",
                    "too_long",
                )
            elif self._info.max_batchable_length is not None and length > self._info.max_batchable_length:
                apart.append(m)
            else:
                (short if length <= self.budget else long).append(m)
        longest = max((len(sequences[m].input_ids) for m in apart), default=0)
        larger = self.budget + max((len(sequences[m].input_ids) for m in long), default=0)
        larger = larger if self._limit is None else min(larger, self._limit)
        attempts = (Attempt(apart, longest, alone=True), Attempt(long, larger), Attempt(short, self.budget))
        return [attempt for attempt in attempts if attempt.rows]

    def _smaller_attempts(self, rows: list[int], budget: int, sequences: Sequence[TokenSequence]) -> list[Attempt]:
        """Halve the budget if needed, and return the attempts for rows that ran out of memory with `budget`."""
        if not rows:
            return []
        smaller = 0  # the batch was already larger than the budget: run every row alone
        if budget <= self.budget:
            smaller = budget // 2
            self.budget = max(1, smaller)
        short = [m for m in rows if len(sequences[m].input_ids) <= smaller]
        alone = [Attempt([m], len(sequences[m].input_ids)) for m in rows if len(sequences[m].input_ids) > smaller]
        return [*alone, Attempt(short, smaller)] if short else alone

    def _plan(self, sequences: Sequence[TokenSequence], budget: int, alone: bool) -> BatchPlan:
        """Return the batches; for several replicas, those that they finish earliest."""

        def plan_within(budget: int) -> BatchPlan:
            width = self._info.max_width
            return plan_layout(self.layout, sequences, max_num_batched_tokens=budget, max_width=width, alone=alone)

        plan = plan_within(budget)
        replicas = self._info.num_replicas
        if replicas == 1 or alone or self.layout == "one_by_one":
            return plan
        longest = max((len(sequence.input_ids) for sequence in sequences), default=0)
        total = sum(batch.input_ids.size + BATCH_TOKENS for batch in plan.batches)
        rounds = -(-total // (replicas * budget))
        # Equal shares; finer ones, which balance better; and shares of a long prefix that every batch must repeat.
        budgets = {-(-total // (replicas * rounds * pieces)) for pieces in (1, 2, 4)}
        budgets |= {longest - (longest - total) // (replicas * rounds)}
        for smaller in sorted({min(budget, max(each, longest)) for each in budgets} - {budget}, reverse=True):
            other = plan_within(smaller)
            if _finish(other.batches, replicas) < _finish(plan.batches, replicas):
                plan = other
        return plan


def _collect(
    plan: BatchPlan,
    outcomes: Sequence[BatchResult],
    attempt: Attempt,
    sequences: Sequence[TokenSequence],
    starts: IntArray,
    result: RunResult,
) -> tuple[list[int], list[int]]:
    """Copy values and failures into the result; return the rows to run in smaller batches, and those to run alone."""
    offsets = np.cumsum([0] + [batch.num_reads for batch in plan.batches])
    sizes = np.bincount(plan.batch_of, minlength=len(plan.batches))
    too_large, broken = [], []
    first = 0
    for k, m in enumerate(attempt.rows):
        b = int(plan.batch_of[k])
        index = plan.value_index[first : first + len(sequences[m].read_positions)]
        first += len(index)
        outcome = outcomes[b]
        if outcome.values is not None:
            values = result.values[starts[m] : starts[m + 1]] = outcome.values[index - offsets[b]]
            if sizes[b] > 1 and not attempt.alone and not np.isfinite(values).all():
                broken.append(m)
        elif outcome.out_of_memory and sizes[b] > 1:
            too_large.append(m)
        elif outcome.out_of_memory or attempt.alone:
            kind = "out_of_memory" if outcome.out_of_memory else "failed"
            result.failures[m] = RowError(f"its batch failed: {outcome.error}", kind)
        else:
            broken.append(m)
    return too_large, broken


def _finish(batches: Sequence[Batch], replicas: int) -> int:
    """Return when the last replica is done, in tokens, if each always takes the largest batch that is left."""
    ends = [0] * replicas
    for size in sorted((batch.input_ids.size + BATCH_TOKENS for batch in batches), reverse=True):
        heapq.heapreplace(ends, ends[0] + size)
    return max(ends)


def _cost(
    batches: Sequence[Batch], outcomes: Sequence[BatchResult], plan_seconds: float, run_seconds: float
) -> Workload:
    done = [batch for batch, outcome in zip(batches, outcomes, strict=True) if outcome.error is None]
    return Workload(
        unique_tokens=sum(batch.num_tokens for batch in done),
        padded_tokens=sum(batch.input_ids.size - batch.num_tokens for batch in done),
        reused_tokens=sum(outcome.reused_tokens for outcome in outcomes),
        num_batches=len(done),
        plan_seconds=plan_seconds,
        run_seconds=run_seconds,
    )
