"""Executors for the ranks of tests, which fail when a batch asks for it. Not a test; ranks import it by name."""

from __future__ import annotations

import os
import time

from gym_rm.engine.executors.executor import BatchResult
from gym_rm.engine.executors.local import LocalExecutor

POISON, SLOW, BROKEN, SPLIT = 390, 391, 392, 393  # token ids that no sequence contains unless a test sets them


class FailingExecutor(LocalExecutor):
    """Ends its process for a batch with the token `POISON`, and is slow or raises for others."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def run(self, batches):
        (batch,) = batches
        if POISON in batch.input_ids:
            os._exit(7)
        if SLOW in batch.input_ids:
            time.sleep(30.0)
        if BROKEN in batch.input_ids:
            return [BatchResult(error="ValueError: a broken batch")]
        if SPLIT in batch.input_ids and self.rank.index == 1:
            return [BatchResult(error="out of memory in one rank", out_of_memory=True)]
        return super().run(batches)


class DyingAtLoad(LocalExecutor):
    def load(self, spec):
        os._exit(3)


def failing(rank):
    return FailingExecutor(rank)


def dying_at_load(rank):
    return DyingAtLoad()
