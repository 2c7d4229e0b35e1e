"""Measure how much faster several replicas of a reward model score than one process.

    python benchmarks/replicas.py [--size 25M] [--groups 16] [--rounds 5] [--most 8]

GSM8K groups of 8 from ../shared/data. Every round runs all methods one after the other: one process with one thread,
one process with two threads, and 1, 2, 4, ... replicas of one thread. The tables show medians over the rounds and
ratios of the medians. The last table shows what a batch costs the driver: the time of a batch with a single token
sequence of 8 tokens in a replica, minus the same in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import results
import torch
import workloads
from rich.console import Console
from rich.table import Table

import gym_rm
from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.executors.parallel_options import ParallelOptions
from gym_rm.engine.executors.processes import ProcessReplica
from gym_rm.engine.executors.replicas import ReplicatedExecutor
from gym_rm.engine.reward_model_scorer import RewardModelScorer
from gym_rm.engine.token_tree import TokenSequence


def replicas_of(folder: str, count: int) -> RewardModelScorer:
    """Return a scorer with replicas of one thread each."""
    executor = ReplicatedExecutor(
        ParallelOptions(num_replicas=count), functools.partial(ProcessReplica, num_replicas=count, threads=1)
    )
    scorer = gym_rm.load_scorer(folder, executor=executor)
    assert isinstance(scorer, RewardModelScorer)
    return scorer


def seconds_of(scorer: RewardModelScorer, conversations: list[workloads.Conversation], threads: int) -> float:
    torch.set_num_threads(threads)
    started = time.perf_counter()
    scorer.score(conversations)
    return time.perf_counter() - started


def overhead(local: RewardModelScorer, pool: RewardModelScorer, batches: int) -> tuple[float, float]:
    """Return the seconds per batch of a small batch: here, and in one replica."""
    ids = np.arange(5, 13, dtype=np.int32)
    (batch,) = plan_trees([TokenSequence(ids, np.array([7]))], max_num_batched_tokens=100).batches

    def per_batch(run: Callable[[], object]) -> float:
        started = time.perf_counter()
        for _ in range(batches):
            run()
        return (time.perf_counter() - started) / batches

    torch.set_num_threads(1)
    return per_batch(lambda: local.executor.run([batch])), per_batch(lambda: pool.executor.run([batch]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="25M", choices=list(workloads.SHAPES))
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, default=8, help="largest number of replicas")
    args = workloads.parse_args(parser)
    console = Console(width=120)
    console.print(f"python {' '.join(sys.argv)}\n{workloads.machine('cpu')}")
    conversations = workloads.gsm8k_groups(args.groups, 8)
    counts = [count for count in (1, 2, 4, 8) if count <= args.most]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        tokenizer = workloads.tokenizer()
        tokenizer.save_pretrained(folder)
        workloads.reward_model(args.size, len(tokenizer)).save_pretrained(folder)
        local = gym_rm.load_scorer(folder)
        assert isinstance(local, RewardModelScorer)
        pools = {count: stack.enter_context(contextlib.closing(replicas_of(folder, count))) for count in counts}
        expected = local.score(conversations)
        for pool in pools.values():
            assert np.array_equal(pool.score(conversations).rewards, expected.rewards), "other bits"
        names = ["one process, 1 thread", "one process, 2 threads"]
        names += [f"{count} replica{'s' * (count > 1)}, 1 thread each" for count in counts]
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(args.rounds):
            seconds[names[0]].append(seconds_of(local, conversations, 1))
            seconds[names[1]].append(seconds_of(local, conversations, 2))
            for name, pool in zip(names[2:], pools.values(), strict=True):
                seconds[name].append(seconds_of(pool, conversations, 1))
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        table = Table("scorer", "seconds", "batches", "x one thread", "x two threads")
        values = {}
        for name, pool in zip(names, [local, local, *pools.values()], strict=True):
            values[name] = {
                "seconds": medians[name],
                "times one thread": medians[names[0]] / medians[name],
                "times two threads": medians[names[1]] / medians[name],
            }
            table.add_row(
                name,
                f"{medians[name]:.3f}",
                f"{pool.score(conversations).workload.num_batches}",
                f"{medians[names[0]] / medians[name]:.2f}",
                f"{medians[names[1]] / medians[name]:.2f}",
            )
        console.print(f"{len(conversations)} conversations, {expected.workload.unique_tokens} unique tokens")
        console.print(table)
        costs = [overhead(local, pools[1], 30) for _ in range(args.rounds)]
        here, there = (statistics.median(column) for column in zip(*costs, strict=True))
        console.print(
            f"a batch of 8 tokens: {1e3 * here:.2f} ms here, {1e3 * there:.2f} ms in a replica; "
            f"the driver costs {1e3 * (there - here):.2f} ms per batch ({os.cpu_count()} cores)"
        )
        count, unique = len(conversations), expected.workload.unique_tokens
        results.save(args.save, {"conversations": count, "unique tokens": unique, "scorers": values})


if __name__ == "__main__":
    main()
