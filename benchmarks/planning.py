"""Measure whether the time of `plan_trees` is linear in the number of tokens, for any shape of tree.

    python benchmarks/planning.py [--rounds 3] [--budget 16384]

The inputs are 1k, 10k and 100k sequences of random tokens in five shapes, from no shared tokens to trees of depth 200.
No model runs and no text is rendered; linear.py measures these on real conversations.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.token_tree import TokenSequence

Ids = NDArray[np.int32]
REPLY = 100


def singles(count: int, random: np.random.Generator) -> Iterator[Ids]:
    """Yield sequences that share no tokens."""
    for _ in range(count):
        yield random.integers(0, 150_000, 2 * REPLY, dtype=np.int32)


def groups(count: int, random: np.random.Generator) -> Iterator[Ids]:
    """Yield groups of eight replies to one prompt."""
    for _ in range(count // 8):
        prompt = random.integers(0, 150_000, REPLY, dtype=np.int32)
        for _ in range(8):
            yield np.concatenate([prompt, random.integers(0, 150_000, REPLY, dtype=np.int32)])


def duplicates(count: int, random: np.random.Generator) -> Iterator[Ids]:
    """Yield copies of ten sequences."""
    few = [random.integers(0, 150_000, 2 * REPLY, dtype=np.int32) for _ in range(10)]
    for k in range(count):
        yield few[k % 10]


def dialogues(count: int, random: np.random.Generator) -> Iterator[Ids]:
    """Yield dialogues of ten turns after every turn; each sequence is a prefix of the next."""
    for _ in range(count // 10):
        dialogue = random.integers(0, 150_000, 10 * REPLY, dtype=np.int32)
        for turn in range(1, 11):
            yield dialogue[: turn * REPLY]


def combs(count: int, random: np.random.Generator) -> Iterator[Ids]:
    """Yield sequences that share one token more than the previous sequence, which makes trees of depth 200."""
    for _ in range(count // 200):
        spine = random.integers(1, 150_000, 201, dtype=np.int32)
        for depth in range(1, 201):
            yield np.append(spine[:depth], np.int32(0))


SHAPES: tuple[Callable[[int, np.random.Generator], Iterator[Ids]], ...] = (
    singles,
    groups,
    duplicates,
    dialogues,
    combs,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=16_384)
    args = parser.parse_args()
    console = Console(width=120)
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    console.print(f"python {' '.join(sys.argv)}\n{platform.machine()}, {os.cpu_count()} cores; {versions}")
    table = Table("shape", "sequences", "tokens", "unique tokens", "trees", "seconds", "ns / token")
    for shape in SHAPES:
        for count in (1_000, 10_000, 100_000):
            random = np.random.default_rng(0)
            sequences = [TokenSequence(ids, np.array([len(ids) - 1])) for ids in shape(count, random)]
            random.shuffle(sequences)  # type: ignore[arg-type]
            seconds = []
            for _ in range(args.rounds):
                started = time.perf_counter()
                plan = plan_trees(sequences, max_num_batched_tokens=args.budget)
                seconds.append(time.perf_counter() - started)
            tokens, median = sum(len(sequence.input_ids) for sequence in sequences), statistics.median(seconds)
            cells = [len(sequences), tokens, plan.num_tokens, len(plan.batches)]
            table.add_row(
                shape.__name__, *(f"{cell:,}" for cell in cells), f"{median:.3f}", f"{median / tokens * 1e9:.0f}"
            )
    console.print(table)


if __name__ == "__main__":
    main()
