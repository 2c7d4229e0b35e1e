"""Batches of a simulated pool, failures of its GPUs, and what is counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class FailureTimes:
    """Failures of a group of GPUs in the order of time: a Poisson process, drawn in blocks, that several may read.

    Args:
        seconds: mean time between failures of one GPU; infinite for none.
        num_gpus: number of GPUs.
        random: generator of its own.
    """

    def __init__(self, seconds: float, num_gpus: int, random: np.random.Generator) -> None:
        self._mean, self._num_gpus, self._random = seconds / max(num_gpus, 1), num_gpus, random
        self._times: list[float] = []
        self._gpus: list[int] = []

    def __getitem__(self, index: int) -> tuple[float, int]:
        """Return the time and the GPU of a failure, by its number from 0."""
        if math.isinf(self._mean):
            return math.inf, 0
        while index >= len(self._times):
            last = self._times[-1] if self._times else 0.0
            self._times += (last + np.cumsum(self._random.exponential(self._mean, 256))).tolist()
            self._gpus += self._random.integers(self._num_gpus, size=256).tolist()
        return self._times[index], self._gpus[index]


class Progress(Protocol):
    """What is known about a batch whose parts finish one by one."""

    def split(self, seconds: float) -> tuple[list[int], Batch | None, float]:
        """Return the rows that are finished after so many seconds of work, a batch of the others, and the share of the
        seconds that the finished rows needed."""
        ...


@dataclass(slots=True, eq=False)
class Batch:
    """Work that one replica does at a time.

    Attributes:
        rows: conversations of the batch, by their numbers in the step.
        seconds: time on a replica of speed 1 that computes alone.
        progress: for generation, which replies are finished when; None if an interrupted batch is lost as a whole.
        alone: one row that runs alone, because replicas died with its batch.
    """

    rows: range | list[int]
    seconds: float
    progress: Progress | None = None
    alone: bool = False
    leases: list[int] = field(default_factory=list)
    lease_ends: float = 0.0
    deaths: int = 0
    done: bool = False
    watched: bool = False


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of one `run`, as arrays.

    Attributes:
        cuts: batch i has the rows `cuts[i]` to `cuts[i + 1]`.
        seconds: of each batch.
        progress: function that returns the `progress` of a batch from its rows and seconds; None for none.
    """

    cuts: npt.NDArray[np.int64]
    seconds: FloatArray
    progress: Callable[[range, float], Progress] | None = None

    def each(self) -> list[Batch]:
        """Return the batches."""
        make, cuts = self.progress, self.cuts.tolist()
        rows = [range(cuts[i], cuts[i + 1]) for i in range(len(self.seconds))]
        pairs = zip(rows, self.seconds.tolist(), strict=True)
        return [Batch(part, total, make(part, total) if make else None) for part, total in pairs]


@dataclass(slots=True)
class Counts:
    """What happened in a pool. Seconds are summed over replicas.

    Attributes:
        scored: conversations that got a result.
        errors: conversations that got an error: their replicas died twice with them, or no restart was left.
        deaths, restarts: replicas that died, and that were ready again.
        duplicates: results of batches that had one already.
        split: batches whose rows ran alone.
        busy: seconds of computing on batches, lost work included.
        redone: seconds of computing that were lost with a replica, or wasted on a second result.
        down: seconds between the death of a replica and its return.
    """

    scored: int = 0
    errors: int = 0
    deaths: int = 0
    restarts: int = 0
    duplicates: int = 0
    split: int = 0
    busy: float = 0.0
    redone: float = 0.0
    down: float = 0.0
