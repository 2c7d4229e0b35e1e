"""Running sequences under a token budget: what fits, what is too much, and whose failure it was.

Sequences are planned into batches of at most the budget's tokens; longer ones go by themselves, with what they share.
Out of memory halves the budget and plans again; any other failure is repeated batch by batch, so that it costs only
the rows of the batches that fail again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from gym_rm.errors import ConfigError, logger, warn_once
from gym_rm.engine.executors import Executor
from gym_rm.engine.kinds import RewardModel, longest_shared
from gym_rm.engine.kinds.reward_model import Batch, FloatArray, Layout
from gym_rm.engine.token_tree import BatchPlan, TokenSequence, plan_padded, plan_trees

NOTHING = {"unique_tokens": 0, "padded_tokens": 0, "num_batches": 0, "plan_seconds": 0.0, "run_seconds": 0.0}
CUDA_BATCHED_TOKENS = 32_768  # enough to fill any GPU; more only holds memory
CPU_BATCHED_TOKENS = 2048  # activations of more tokens leave the caches, and their pages are mapped anew each time


@dataclass(frozen=True, slots=True)
class RunResult:
    """What M sequences gave.

    Attributes:
        values: float32 `[sum R, K]`, the reads of the first sequence, then of the second, and so on; NaN where failed.
        failures: why a sequence has no values, by its place.
        workload: what it took: the fields of `Workload` by name.
    """

    values: FloatArray
    failures: dict[int, str]
    workload: dict[str, Any]


class BudgetedRunner:
    """Runs sequences in batches of at most `budget` tokens.

    Args:
        model: says what fits (`layout.longest_shared`, memory per token) and how many numbers a value has.
        layout: of the batches.
        budget: most tokens of a batch, padding included; `"auto"` by the device's free memory.

    Raises:
        ConfigError: the budget is no positive integer.
    """

    def __init__(self, model: RewardModel, *, layout: Layout, budget: int | Literal["auto"] = "auto") -> None:
        self.layout = layout
        self._budget = _automatic_budget(model) if budget == "auto" else _checked(budget)
        # The automatic budget is a good size, not a limit: longer sequences get room beside what they share.
        self._limit = None if budget == "auto" else self._budget
        self._longest_shared = longest_shared(model)
        self._num_values = model.num_values

    @property
    def budget(self) -> int:
        """Most tokens of a batch; halved after running out of memory."""
        return self._budget

    @budget.setter
    def budget(self, budget: int) -> None:
        self._budget = _checked(budget)
        self._limit = None if self._limit is None else budget

    def run(self, sequences: Sequence[TokenSequence], executor: Executor) -> RunResult:
        """Values of M sequences at their reads; a failure costs the sequences that it belongs to."""
        lengths = [len(sequence.input_ids) for sequence in sequences]
        starts = np.cumsum([0] + [len(sequence.reads) for sequence in sequences])
        result = RunResult(np.full((starts[-1], self._num_values), np.nan, dtype=np.float32), {}, dict(NOTHING))
        waiting = []
        for m, length in enumerate(lengths):
            if self._limit is not None and length > self._limit:
                result.failures[m] = (
                    f"the conversation has {length} tokens, over max_num_batched_tokens={self._limit}, and a "
                    "conversation is not split; raise it, or set max_length with overlong='drop_turns'"
                )
            else:
                waiting.append(m)

        def attempt(rows: list[int], budget: int, *, isolated: bool = False) -> bool:
            """Run these sequences; False, and nothing is done, if memory ran out."""
            if not rows:
                return True
            started = time.perf_counter()
            plan = self._plan([sequences[m] for m in rows], budget)
            planned = time.perf_counter()
            outcome = (self._run_one_by_one if isolated else self._run_batches)(plan.batches, executor)
            result.workload["plan_seconds"] += planned - started
            result.workload["run_seconds"] += time.perf_counter() - planned
            if outcome is None:
                return False
            stacked, broken = outcome
            place = 0
            for m in rows:
                index = plan.value_index[place : place + len(sequences[m].reads)]
                result.values[starts[m] : starts[m + 1]] = stacked[index]
                if int(index[0]) in broken:
                    result.failures[m] = broken[int(index[0])]
                place += len(index)
            result.workload["unique_tokens"] += plan.unique_tokens
            result.workload["padded_tokens"] += plan.padded_tokens
            result.workload["num_batches"] += len(plan.batches)
            return True

        before = self._budget
        while not attempt([m for m in waiting if lengths[m] <= self._budget], self._budget):
            self._budget //= 2
        long = [m for m in waiting if lengths[m] > self._budget]
        room = max([lengths[m] for m in long], default=0) + self._budget
        if not attempt(long, room if self._limit is None else min(room, self._limit)):
            for m in long:
                attempt([m], lengths[m], isolated=True)
        if len(result.failures) == len(sequences):
            self._budget = before  # nothing worked, so nothing was learnt
        self._budget = max(1, self._budget)
        if self._budget < before:
            warn_once(
                f"out of memory with max_num_batched_tokens={before}: continuing with {self._budget}. The scores stay "
                "the same; pass the smaller number next time."
            )
        return result

    def _plan(self, sequences: Sequence[TokenSequence], budget: int) -> BatchPlan:
        alone = self.layout == "one_by_one" or (
            self._longest_shared is not None and any(len(s.input_ids) > self._longest_shared for s in sequences)
        )
        if self.layout == "tree" and not alone:
            return plan_trees(sequences, max_num_batched_tokens=budget)
        return plan_padded(sequences, max_num_batched_tokens=budget, alone=alone)

    def _run_batches(self, batches: Sequence[Batch], executor: Executor) -> tuple[FloatArray, dict[int, str]] | None:
        """Values of all batches stacked, and for every value of a batch that failed, why; None if memory ran out."""
        try:
            return self._run(batches, executor), {}
        except Exception as error:
            out_of_memory = _is_out_of_memory(error)
            reason = f"{type(error).__name__}: {error}"
        # Out here the failed forward's tensors are gone.
        if out_of_memory:
            _free_memory()
            return None
        logger.warning("a batch failed (%s); running the batches one by one", reason)
        return self._run_one_by_one(batches, executor)

    def _run_one_by_one(self, batches: Sequence[Batch], executor: Executor) -> tuple[FloatArray, dict[int, str]]:
        values: list[FloatArray] = []
        broken: dict[int, str] = {}
        place = 0
        for batch in batches:
            reason = None
            try:
                values.append(self._run([batch], executor))
            except Exception as error:
                reason = f"its batch failed: {type(error).__name__}: {error}"
            if reason is not None:
                _free_memory()
                values.append(np.full((len(batch.reads), self._num_values), np.nan, dtype=np.float32))
                broken.update((place + k, reason) for k in range(len(batch.reads)))
            place += len(batch.reads)
        return np.concatenate(values), broken

    def _run(self, batches: Sequence[Batch], executor: Executor) -> FloatArray:
        values = executor.run(batches)
        expected = (sum(len(batch.reads) for batch in batches), self._num_values)
        if getattr(values, "shape", None) != expected:
            got = f"shape {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
            raise ValueError(f"{type(executor).__name__}.run must give values of shape {expected}; got {got}.")
        return values


def _free_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _automatic_budget(model: RewardModel) -> int:
    if model.device.type != "cuda":
        return CPU_BATCHED_TOKENS
    free, _ = torch.cuda.mem_get_info(model.device)
    return min(CUDA_BATCHED_TOKENS, max(CPU_BATCHED_TOKENS, int(0.5 * free / model.bytes_per_token)))


def _checked(budget: int) -> int:
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise ConfigError(f"max_num_batched_tokens must be 'auto' or a positive integer; got {budget!r}.")
    return budget


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
