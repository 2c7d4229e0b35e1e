"""Measure whether the cost of scoring grows linearly with the number of unique tokens.

    python benchmarks/linear.py

The inputs are 1k, 10k and 100k conversations from ../shared/data: GSM8K problems in groups of 8 replies. Rendering and
planning are measured for all three sizes, the forward of a model with 1M parameters for 1k and 10k, and for 100k with
`--full`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np
import results
import workloads
from rich.console import Console
from rich.table import Table

from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.reward_model_scorer import RewardModelScorer
from gym_rm.engine.token_tree import TokenSequence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="also run the model on 100k conversations (takes minutes)")
    parser.add_argument("--rounds", type=int, default=3)
    args = workloads.parse_args(parser)
    tokenizer = workloads.tokenizer()
    scorer = RewardModelScorer(workloads.reward_model("1M", len(tokenizer)), tokenizer)
    console = Console(width=160)
    console.print(f"python {' '.join(sys.argv)}\n{workloads.machine('cpu')}")
    table = Table(
        "conversations", "real tokens", "unique tokens", "render s", "plan s", "plan us/token", "run s", "run us/token"
    )
    values = {}
    for count in (1_000, 10_000, 100_000):
        conversations = workloads.gsm8k_groups(count // 8, 8)
        started = time.perf_counter()
        rendered = scorer.renderer.encode(conversations)
        render_seconds = time.perf_counter() - started
        sequences = [TokenSequence(one.input_ids, np.array([len(one.input_ids) - 1])) for one in rendered]
        plan_seconds = []
        for _ in range(args.rounds):
            started = time.perf_counter()
            plan = plan_trees(sequences, max_num_batched_tokens=scorer.max_num_batched_tokens)
            plan_seconds.append(time.perf_counter() - started)
        real = sum(len(sequence.input_ids) for sequence in sequences)
        plan_median = statistics.median(plan_seconds)
        cells = [f"{len(sequences)}", f"{real}", f"{plan.num_tokens}", f"{render_seconds:.2f}", f"{plan_median:.3f}"]
        cells.append(f"{plan_median / real * 1e6:.3f}")
        values[f"{count:,}"] = of = {
            "tokens": real,
            "unique tokens": plan.num_tokens,
            "render seconds": render_seconds,
            "plan seconds": plan_median,
        }
        if count <= 10_000 or args.full:
            started = time.perf_counter()
            scorer.executor.run(plan.batches)
            run_seconds = time.perf_counter() - started
            of |= {"run seconds": run_seconds, "run us per token": run_seconds / plan.num_tokens * 1e6}
            cells += [f"{run_seconds:.2f}", f"{run_seconds / plan.num_tokens * 1e6:.2f}"]
        table.add_row(*cells)
    console.print(table)
    results.save(args.save, values)


if __name__ == "__main__":
    main()
