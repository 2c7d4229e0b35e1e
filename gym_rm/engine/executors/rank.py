"""A rank: one process of a group that runs every batch together, each with a shard of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gym_rm.engine.executors.executor import Executor
from gym_rm.engine.executors.tensor_parallel import RankExecutor


@dataclass(frozen=True, slots=True)
class Rank:
    """Place of a process in its group.

    Attributes:
        index: index of this rank, from 0.
        size: number of ranks in the group.
        store: where the ranks meet: `"file:PATH"` of a file that does not exist yet, or `"tcp:HOST:PORT"` of a store
            that the driver owns. None if the group has one rank.
        device_index: index of the GPU among those that this process sees; not used on CPUs.
        threads: number of torch's threads on the CPU; None for torch's choice.
    """

    index: int = 0
    size: int = 1
    store: str | None = None
    device_index: int = 0
    threads: int | None = None


def start_rank(rank: Rank) -> Executor:
    """Join the group of a rank and return the executor that runs its part of every batch.

    All ranks must call the same methods in the same order. Call it once, in a process that was started for it.
    """
    if rank.threads is not None:
        torch.set_num_threads(rank.threads)
    return RankExecutor(rank)
