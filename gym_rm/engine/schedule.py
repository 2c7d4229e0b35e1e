"""Batches under a token budget: what fits, what is too much, and which sequences a failure belongs to. No torch.

Sequences are planned into batches of at most the budget's tokens; longer ones get larger batches of their own. A batch
that runs out of memory is planned again in halves, any other failed batch is run once more; what fails then costs only
the sequences of that batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from gym_rm.checks import integer
from gym_rm.engine.executors.executor import BatchResult, Executor, ModelInfo
from gym_rm.engine.token_tree import Batch, BatchPlan, IntArray, Layout, TokenSequence, plan_padded, plan_trees
from gym_rm.errors import ConfigError, logger, warn_once
from gym_rm.scores import FloatArray, Workload

Budget: TypeAlias = int | Literal["auto"]


@dataclass(slots=True)
class RunResult:
    """What M sequences gave.

    Attributes:
        values: float32 `[sum R, K]`, the reads of the first sequence, then of the second, and so on; NaN where failed.
        failures: why a sequence has no values, by its index.
        workload: what it cost.
    """

    values: FloatArray
    failures: dict[int, str] = field(default_factory=dict)
    workload: Workload = field(default_factory=Workload)


class Scheduler:
    """Plans sequences into batches of at most `budget` tokens, and runs them through an executor.

    Args:
        info: what the executor's model can take.
        layout: of the batches.
        budget: most tokens of a batch, padding included; `"auto"` for what suits the free memory.

    Raises:
        ConfigError: the budget is not a positive integer.
    """

    def __init__(self, info: ModelInfo, *, layout: Layout, budget: Budget = "auto") -> None:
        self.layout = layout
        self._info = info
        checked = checked_budget(budget)
        self._budget = info.max_num_batched_tokens if checked == "auto" else checked
        # The automatic budget is a good size, not a limit: longer sequences run in a larger batch of their own.
        self._limit = None if budget == "auto" else self._budget

    @property
    def budget(self) -> int:
        """Most tokens of a batch; halved after running out of memory."""
        return self._budget

    @budget.setter
    def budget(self, budget: int) -> None:
        self._budget = integer("max_num_batched_tokens", budget, minimum=1)
        self._limit = None if self._limit is None else self._budget

    def run(self, sequences: Sequence[TokenSequence], executor: Executor) -> RunResult:
        """Values of M sequences where they are read; a failure costs only the sequences that it belongs to."""
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
            self._budget = before  # nothing worked, so nothing was learnt
        if self._budget < before:
            warn_once(
                f"out of memory with max_num_batched_tokens={before}: continuing with {self._budget}. The scores stay "
                "the same; pass the smaller number next time."
            )
        return result

    def _first_attempts(self, sequences: Sequence[TokenSequence], result: RunResult) -> list[Attempt]:
        """Everything within the budget together, and longer sequences together with room for what they share."""
        short: list[int] = []
        long: list[int] = []
        for m, sequence in enumerate(sequences):
            length = len(sequence.input_ids)
            if self._limit is not None and length > self._limit:
                result.failures[m] = (
                    f"the conversation has {length} tokens, over max_num_batched_tokens={self._limit}, and a "
                    "conversation is not split; raise it, or set max_length with overlong='drop_turns'"
                )
            else:
                (short if length <= self._budget else long).append(m)
        room = self._budget + max((len(sequences[m].input_ids) for m in long), default=0)
        attempts = [(long, room if self._limit is None else min(room, self._limit)), (short, self._budget)]
        return [attempt for attempt in attempts if attempt[0]]

    def _smaller_attempts(
        self, rows: list[int], budget: int, sequences: Sequence[TokenSequence], result: RunResult
    ) -> list[Attempt]:
        """What to try after these rows ran out of memory in a batch of this budget."""
        if not rows:
            return []
        smaller = 0  # longer than the budget already: each by itself
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
        """The results, with an error in place of values that do not have the shape that was asked for."""
        name = f"{type(executor).__name__}.run"
        if len(outcomes) != len(batches):
            reason = f"{name} must return one result per batch; got {len(outcomes)} for {len(batches)}"
            return [BatchResult(error=reason)] * len(batches)
        checked = list(outcomes)
        for b, (batch, outcome) in enumerate(zip(batches, outcomes, strict=True)):
            expected = (batch.num_reads, self._info.num_values)
            if outcome.error is None and getattr(outcome.values, "shape", None) != expected:
                got = getattr(outcome.values, "shape", type(outcome.values).__name__)
                checked[b] = BatchResult(error=f"{name} must give values of shape {expected}; got {got}")
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
    """Put the values and failures of a plan's batches into the result; the rows that ran out of memory together."""
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
    """A token budget, if it is one.

    Raises:
        ConfigError: neither a positive integer nor `"auto"`.
    """
    if isinstance(budget, str) and budget == "auto":
        return "auto"
    try:
        return integer("max_num_batched_tokens", budget, minimum=1)
    except ConfigError as error:
        raise ConfigError(f"{error} Or pass 'auto'.") from None
