"""Batches for executors, the values of their results, and what to wait for. Not a test."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from gym_rm.engine.batch_planning import plan_padded, plan_trees
from gym_rm.engine.executors.executor import LoadSpec
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.kinds.readouts import ModuleHead
from gym_rm.engine.loading.checkpoint import LoadOptions, open_checkpoint
from gym_rm.engine.token_tree import TokenSequence

needs_gpu = pytest.mark.gpu

HEAD = ModuleHead("score")
MARK = 399  # a token id that no sequence contains unless a test sets it


def sequences(count=6, seed=0):
    random = np.random.default_rng(seed)
    prompt = random.integers(5, 300, 20)
    replies = [np.r_[prompt, random.integers(5, 300, 3 + k)].astype(np.int32) for k in range(count)]
    return [TokenSequence(ids, np.array([len(ids) - 1])) for ids in replies]


def trees(budget=500):
    return plan_trees(sequences(), max_num_batched_tokens=budget).batches


def batches_with_a_mark(layout="tree"):
    """Return three batches; the second contains the mark."""
    several = sequences(3)
    several[1].input_ids[-1] = MARK
    plan = plan_trees if layout == "tree" else plan_padded
    batches = [plan([each], max_num_batched_tokens=500).batches[0] for each in several]
    assert [MARK in batch.input_ids for batch in batches] == [False, True, False]
    return batches


def executor_of(model, readout=HEAD, **options):
    executor = LocalExecutor()
    executor.load(LoadSpec(model, readout, **options))
    return executor


def values_of(executor, batches):
    """Return the values of all batches, stacked; assert that none has failed."""
    results = executor.run(batches)
    assert [result.error for result in results] == [None] * len(batches)
    return np.concatenate([result.values for result in results])


def spec_of(folder, **options):
    return LoadSpec(open_checkpoint(LoadOptions(path=folder)), HEAD, **options)


def tree_with(token):
    (one,) = sequences(1)
    one.input_ids[-1] = token
    return plan_trees([one], max_num_batched_tokens=500).batches[0]


def gone(process_id):
    """Return whether a process has ended, waiting for at most ten seconds."""
    for _ in range(200):
        if not os.path.exists(f"/proc/{process_id}"):
            return True
        time.sleep(0.05)
    return False


def until(condition, seconds=10):
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.02)
    assert condition()
