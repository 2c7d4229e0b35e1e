"""Running sequences under a token budget: what fits, what is too much, and whose failure it was.

Sequences are planned into batches of at most the budget's tokens. Out of memory halves the budget and plans again; any
other failure is repeated batch by batch, so that it costs only the rows of the batches that fail again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from gym_rm.errors import ConfigError, logger, warn_once
from gym_rm.executors import Executor
from gym_rm.models import RewardModel, longest_shared
from gym_rm.models.reward_model import Batch, FloatArray, Layout
from gym_rm.token_tree import BatchPlan, TokenSequence, plan_padded, plan_trees

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
        self.budget = _automatic_budget(model) if budget == "auto" else _checked(budget)
        # The automatic budget is a good size, not a limit: a longer sequence gets a forward of its own length.
        self._stretches = budget == "auto"
        self._longest_shared = longest_shared(model)
        self._num_values = model.num_values

    def run(self, sequences: Sequence[TokenSequence], executor: Executor) -> RunResult:
        """Values of M sequences at their reads."""
        before = self.budget
        while True:
            budget = max([self.budget, *(len(one.input_ids) for one in sequences)]) if self._stretches else self.budget
            fitting = [m for m, sequence in enumerate(sequences) if len(sequence.input_ids) <= budget]
            started = time.perf_counter()
            plan = self._plan([sequences[m] for m in fitting], budget)
            planned = time.perf_counter()
            try:
                stacked, broken = self._run_batches(plan.batches, executor)
                break
            except torch.OutOfMemoryError:
                if not self._halve(longest=max(len(sequences[m].input_ids) for m in fitting)):
                    stacked, broken = self._run_one_by_one(plan.batches, executor)
                    break
        finished = time.perf_counter()
        if self.budget < before:
            warn_once(
                f"out of memory with max_num_batched_tokens={before}: continuing with {self.budget}. The scores stay "
                "the same; pass the smaller number next time."
            )
        starts = np.cumsum([0] + [len(sequence.reads) for sequence in sequences])
        values = np.full((starts[-1], self._num_values), np.nan, dtype=np.float32)
        failures = {
            m: f"the conversation has {len(sequences[m].input_ids)} tokens, over max_num_batched_tokens={budget}, and "
            "a conversation is not split; raise it, or set max_length with overlong='drop_turns'"
            for m in sorted(set(range(len(sequences))) - set(fitting))
        }
        place = 0
        for m in fitting:
            index = plan.value_index[place : place + len(sequences[m].reads)]
            values[starts[m] : starts[m + 1]] = stacked[index]
            if int(index[0]) in broken:
                failures[m] = broken[int(index[0])]
            place += len(index)
        workload = {
            "unique_tokens": plan.unique_tokens,
            "padded_tokens": plan.padded_tokens,
            "num_batches": len(plan.batches),
            "plan_seconds": planned - started,
            "run_seconds": finished - planned,
        }
        return RunResult(values, failures, workload)

    def _plan(self, sequences: Sequence[TokenSequence], budget: int) -> BatchPlan:
        alone = self.layout == "one_by_one" or (
            self._longest_shared is not None and any(len(s.input_ids) > self._longest_shared for s in sequences)
        )
        if self.layout == "tree" and not alone:
            return plan_trees(sequences, max_num_batched_tokens=budget)
        return plan_padded(sequences, max_num_batched_tokens=budget, alone=alone)

    def _run_batches(self, batches: Sequence[Batch], executor: Executor) -> tuple[FloatArray, dict[int, str]]:
        """Values of all batches stacked, and for every value of a batch that failed, why."""
        try:
            return executor.run(batches), {}
        except Exception as error:
            if _is_out_of_memory(error):
                raise torch.OutOfMemoryError(str(error)) from error
            logger.warning("a batch failed (%s: %s); running the batches one by one", type(error).__name__, error)
        return self._run_one_by_one(batches, executor)

    def _run_one_by_one(self, batches: Sequence[Batch], executor: Executor) -> tuple[FloatArray, dict[int, str]]:
        values: list[FloatArray] = []
        broken: dict[int, str] = {}
        place = 0
        for batch in batches:
            try:
                values.append(executor.run([batch]))
            except Exception as error:
                values.append(np.full((len(batch.reads), self._num_values), np.nan, dtype=np.float32))
                reason = f"its batch failed: {type(error).__name__}: {error}"
                broken.update((place + k, reason) for k in range(len(batch.reads)))
            place += len(batch.reads)
        return np.concatenate(values), broken

    def _halve(self, *, longest: int) -> bool:
        """Remember a smaller budget after running out of memory; False once the longest sequence fills it."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self.budget <= longest:
            return False
        self.budget = max(longest, self.budget // 2)
        return True


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
