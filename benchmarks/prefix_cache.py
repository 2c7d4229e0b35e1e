"""Measure the time that the prefix cache saves when the turns of a dialogue are scored one after the other.

    python benchmarks/prefix_cache.py [--size 25M] [--dialogues 16]

HH dialogues of at least five messages from ../shared/data are scored after each assistant turn, as `env.step` does. A
scorer without a prefix cache and one with `prefix_cache_tokens` alternate; the table shows medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np
import results
import scoring
import workloads
from rich.console import Console
from rich.table import Table

from gym_rm.engine.reward_model_scorer import RewardModelScorer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="25M", choices=list(workloads.SHAPES))
    parser.add_argument("--dialogues", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3, help="number of measurements of each scorer")
    args = workloads.parse_args(parser)
    console = Console(width=120)
    console.print(f"python {' '.join(sys.argv)}\n{workloads.machine('cpu')}")
    tokenizer = workloads.tokenizer()
    model = workloads.reward_model(args.size, len(tokenizer))
    plain = RewardModelScorer(model, tokenizer)
    dialogues = [
        row["context"] + row["completions"][0]["completion"]
        for row in workloads.rows("hh_harmless")
        if len(row["context"]) >= 5
    ][: args.dialogues]
    table = Table(
        "messages", "tokens", "unique", "reused", "plain s", "cached s", "plain / cached", "largest difference"
    )
    seconds: dict[int, list[tuple[float, float]]] = {2: [], 4: [], 6: []}
    rows = {}
    for _ in range(args.rounds):
        cached = scoring.loaded(model, tokenizer, prefix_cache_tokens=100_000)
        for messages, times in seconds.items():
            conversations = [dialogue[:messages] for dialogue in dialogues]
            started = time.perf_counter()
            expected = plain.score(conversations)
            between = time.perf_counter()
            scores = cached.score(conversations)
            times.append((between - started, time.perf_counter() - between))
            rows[messages] = (scores.workload, float(np.abs(scores.rewards - expected.rewards).max()))
    values = {}
    for messages, times in seconds.items():
        work, difference = rows[messages]
        before, after = (statistics.median(column) for column in zip(*times, strict=True))
        values[f"{messages}"] = {
            "unique tokens": work.unique_tokens,
            "reused tokens": work.reused_tokens,
            "times": before / after,
            "largest difference": difference,
        }
        table.add_row(
            f"{messages}",
            f"{work.num_tokens}",
            f"{work.unique_tokens}",
            f"{work.reused_tokens}",
            f"{before:.3f}",
            f"{after:.3f}",
            f"{before / after:.2f}",
            f"{difference:.1e}",
        )
    console.print(table)
    results.save(args.save, values)


if __name__ == "__main__":
    main()
