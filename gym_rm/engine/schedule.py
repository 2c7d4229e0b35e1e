"""Plan batches under a token budget, run them, and assign failures to sequences. Does not import torch.

A sequence longer than the automatic budget runs in a larger batch. After a batch runs out of memory, its sequences are
planned again with half the budget. After a batch fails for another reason (also because its replica died), each of its
sequences runs alone. So do sequences whose values are not finite, because a NaN can come from another sequence of the
batch. Only a sequence that fails again gets an error.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from gym_rm.engine.batch_planning import plan_layout
from gym_rm.engine.debugging import current_call, stage
from gym_rm.engine.executors.executor import BatchResult, Executor, ModelInfo
from gym_rm.engine.token_tree import Batch, BatchPlan, Layout, TokenSequence
from gym_rm.errors import RowError, logger, warn_once
from gym_rm.scores import FloatArray
from gym_rm.types import Workload

Budget: TypeAlias = int | Literal["auto"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """Sequences that are planned together.

    Attributes:
        rows: indices of the sequences.
        budget: token budget of their batches.
        alone: whether each sequence gets a batch of its own.
        again: whether the sequences have run before; one that fails alone then gets an error.
    """

    rows: list[int]
    budget: int
    alone: bool = False
    again: bool = False


@dataclass(slots=True)
class RunResult:
    """Values and failures of M sequences.

    Attributes:
        sequences: the sequences.
        values: float32 `[R, K]` for each sequence; NaN if it failed.
        failures: error of each failed sequence, by its index.
        saved: file with the batch of a sequence whose values are not finite, if it was saved, by its index.
        workload: cost of the run.
    """

    sequences: list[TokenSequence] = field(default_factory=list)
    values: list[FloatArray] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    saved: dict[int, str] = field(default_factory=dict)
    workload: Workload = field(default_factory=Workload)


class Scheduler:
    """Plans sequences into batches of at most `budget` tokens and runs them through an executor.

    Args:
        info: properties of the executor's model.
        layout: layout of the batches.
        budget: maximum number of tokens in a batch, padding included; `"auto"` uses the budget of `info`.

    Attributes:
        budget: maximum number of tokens in a batch; halved after running out of memory.
        ahead: whether text and batches are made while the device computes, which only a GPU does beside the host.
    """

    def __init__(self, info: ModelInfo, *, layout: Layout, budget: Budget = "auto") -> None:
        self.layout = layout
        self._info = info
        # The automatic budget is not a limit: longer sequences run in a larger batch of their own.
        self._limit = None if budget == "auto" else budget
        self.budget = info.max_num_batched_tokens if budget == "auto" else budget
        self.ahead = layout == "tree" and info.device.startswith("cuda") and info.num_replicas == 1

    def run(self, chunks: Iterable[Sequence[TokenSequence]], executor: Executor) -> RunResult:
        """Run M sequences, which come in chunks, and return their values; a failed batch affects only its own."""
        result, before = RunResult(), self.budget
        pending: list[Iterable[Attempt]] = [self._first_attempts(chunks, result)]
        while pending:
            too_large: dict[int, list[int]] = {}  # by budget
            plans: list[tuple[Attempt, BatchPlan]] = []
            begun = time.perf_counter()
            batches: Iterable[Batch] = self._batches(pending.pop(), result, plans)
            batches = batches if self.ahead else [*batches]
            ran = iter(executor.run(batches) if batches else ())
            result.workload += Workload(run_seconds=time.perf_counter() - begun)
            for attempt, plan in plans:
                outcomes = [*itertools.islice(ran, len(plan.batches))]
                for b, (batch, outcome) in enumerate(zip(plan.batches, outcomes, strict=True)):
                    log = "%s: batch %d of %d unique tokens and %d with padding on replica %d%s"
                    sizes = b, batch.num_tokens, batch.input_ids.size, outcome.replica
                    logger.debug(log, current_call(), *sizes, ", again" if attempt.again else "")
                    shape = batch.num_reads, self._info.num_values
                    if outcome.values is not None and outcome.values.shape != shape:  # as of a replaced head
                        reason = f"the model must return values of the shape {shape}, got {outcome.values.shape}"
                        outcomes[b] = BatchResult(error=reason)
                result.workload += _cost(plan.batches, outcomes, attempt)
                large, broken = _collect(plan, outcomes, attempt, result)
                too_large.setdefault(attempt.budget, []).extend(large)
                if broken:
                    reason = next((each.error for each in outcomes if each.error), "values that are not finite")
                    counts = len(broken), len(attempt.rows)
                    logger.warning("%d of %d sequences failed (%s); running each alone", *counts, reason)
                    longest = max(len(result.sequences[m].input_ids) for m in broken)
                    pending.append([Attempt(broken, longest, alone=True, again=True)])
            for budget, rows in too_large.items():
                pending += [[attempt] for attempt in self._smaller_attempts(rows, budget, result.sequences)]
        if self.budget < before and len(result.failures) == len(result.sequences):
            self.budget = before  # less memory would not have helped
        elif self.budget < before:
            warn_once(
                f"out of memory with max_num_batched_tokens={before}; continuing with {self.budget}. Scores do not "
                f"change. Pass max_num_batched_tokens={self.budget} if this happens again."
            )
        return result

    def _batches(
        self, attempts: Iterable[Attempt], result: RunResult, plans: list[tuple[Attempt, BatchPlan]]
    ) -> Iterator[Batch]:
        """Yield the batches of attempts, and add their plans to `plans`."""
        for attempt in attempts:
            begun = time.perf_counter()
            with stage("plan"):
                plan = self._plan([result.sequences[m] for m in attempt.rows], attempt.budget, attempt.alone)
            plans.append((attempt, plan))
            seconds = time.perf_counter() - begun
            result.workload += Workload(plan_seconds=seconds, run_seconds=-seconds)
            yield from plan.batches

    def _first_attempts(self, chunks: Iterable[Sequence[TokenSequence]], result: RunResult) -> Iterator[Attempt]:
        """Yield attempts: sequences within the budget, longer ones with a larger budget, and those that run alone."""
        for chunk in chunks:
            short, long, apart = list[int](), list[int](), list[int]()
            for m, sequence in enumerate(chunk, start=len(result.sequences)):
                result.values.append(np.full((len(sequence.read_positions), self._info.num_values), np.nan, np.float32))
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
            result.sequences += chunk
            longest = max((len(result.sequences[m].input_ids) for m in apart), default=0)
            larger = self.budget + max((len(result.sequences[m].input_ids) for m in long), default=0)
            larger = larger if self._limit is None else min(larger, self._limit)
            attempts = (Attempt(short, self.budget), Attempt(long, larger), Attempt(apart, longest, alone=True))
            yield from (attempt for attempt in attempts if attempt.rows)

    def _smaller_attempts(self, rows: list[int], budget: int, sequences: Sequence[TokenSequence]) -> list[Attempt]:
        """Halve the budget if needed, and return the attempts for rows that ran out of memory with `budget`."""
        if not rows:
            return []
        smaller = 0  # the batch was already larger than the budget: run every row alone
        if budget <= self.budget:
            smaller = budget // 2
            self.budget = max(1, smaller)
        short = [m for m in rows if len(sequences[m].input_ids) <= smaller]
        long = [m for m in rows if len(sequences[m].input_ids) > smaller]
        alone = [Attempt([m], len(sequences[m].input_ids), again=True) for m in long]
        return [*alone, Attempt(short, smaller, again=True)] if short else alone

    def _plan(self, sequences: Sequence[TokenSequence], budget: int, alone: bool) -> BatchPlan:
        """Return the batches; for several replicas, at least one of equal size for each."""
        plan = functools.partial(plan_layout, self.layout, sequences, max_width=self._info.max_width, alone=alone)
        whole = plan(max_num_batched_tokens=budget)
        replicas = self._info.num_replicas
        if replicas == 1 or alone or self.layout == "one_by_one":
            return whole
        total = sum(batch.input_ids.size for batch in whole.batches)
        rounds = -(-total // (replicas * budget))
        longest = max((len(sequence.input_ids) for sequence in sequences), default=0)
        # Every batch may have to repeat a long prefix.
        share = longest - (longest - total) // (replicas * rounds) if rounds else budget
        return plan(max_num_batched_tokens=share) if share < budget else whole


def _collect(
    plan: BatchPlan, outcomes: Sequence[BatchResult], attempt: Attempt, result: RunResult
) -> tuple[list[int], list[int]]:
    """Copy values and failures into the result; return the rows to run in smaller batches, and those to run alone."""
    offsets = np.cumsum([0] + [batch.num_reads for batch in plan.batches])
    sizes = np.bincount(plan.batch_of, minlength=len(plan.batches))
    too_large, broken = [], []
    first = 0
    for k, m in enumerate(attempt.rows):
        b = int(plan.batch_of[k])
        index = plan.value_index[first : first + len(result.values[m])]
        first += len(index)
        outcome = outcomes[b]
        if outcome.values is not None:
            values = result.values[m] = outcome.values[index - offsets[b]]
            if sizes[b] > 1 and not np.isfinite(values).all():
                broken.append(m)
            elif outcome.saved is not None:
                result.saved[m] = outcome.saved
        elif outcome.out_of_memory and sizes[b] > 1:
            too_large.append(m)
        elif outcome.out_of_memory or (attempt.alone and attempt.again):
            kind = "out_of_memory" if outcome.out_of_memory else "failed"
            result.failures[m] = RowError(f"its batch failed: {outcome.error}", kind)
        else:
            broken.append(m)
    return too_large, broken


def _cost(batches: Sequence[Batch], outcomes: Sequence[BatchResult], attempt: Attempt) -> Workload:
    done = [batch for batch, outcome in zip(batches, outcomes, strict=True) if outcome.error is None]
    return Workload(
        unique_tokens=sum(batch.num_tokens for batch in done),
        padded_tokens=sum(batch.input_ids.size - batch.num_tokens for batch in done),
        reused_tokens=sum(outcome.reused_tokens for outcome in outcomes),
        num_batches=len(done),
        num_retries=len(batches) if attempt.again else 0,
        peak_memory_bytes=max((outcome.peak_memory_bytes for outcome in outcomes), default=0),
    )
