"""How often does a lower precision turn a preference round?

    python benchmarks/precision.py [--device cuda]

HH preference pairs from ../shared/data. The reference is the plain Hugging Face forward in float32, one conversation at
a time; against it, our engine in float32, with batch_invariant=True, and in bfloat16 (head in float32), and the plain
model in bfloat16 with its own bfloat16 head. A flip is a pair whose order changes or becomes a tie. Random weights make
this hard: the two replies of a pair score far closer together than a trained model would put them.
"""

from __future__ import annotations

import argparse
import copy
import sys

import numpy as np
import torch
import workloads
from rich.console import Console
from rich.table import Table

from gym_rm.engine import RewardModelScorer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--size", default="1M", choices=list(workloads.SHAPES))
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    console = Console(width=140)
    console.print(f"python {' '.join(sys.argv)}\n{workloads.machine(args.device)}")
    tokenizer = workloads.tokenizer()
    model = workloads.reward_model(args.size, len(tokenizer), device=args.device)
    half = copy.deepcopy(model).to(torch.bfloat16)
    conversations = workloads.hh_groups(args.pairs, 2, first=args.first)
    scorer = RewardModelScorer(model, tokenizer)
    ids = [torch.from_numpy(one.input_ids.astype(np.int64))[None] for one in scorer.renderer.encode(conversations)]
    with torch.inference_mode():
        reference = np.array([model(one.to(args.device)).logits.item() for one in ids])
        sides = {
            "ours, float32": scorer.score(conversations).rewards,
            "ours, float32, batch_invariant": RewardModelScorer(model, tokenizer, batch_invariant=True)
            .score(conversations)
            .rewards,
            "ours, bfloat16": RewardModelScorer(half, tokenizer).score(conversations).rewards,
            "plain, bfloat16": np.array([half(one.to(args.device)).logits.item() for one in ids]),
        }
    order = np.sign(reference[::2] - reference[1::2])
    table = Table("side", "largest difference", "mean difference", "flips", "of them ties", "flip rate")
    for name, rewards in sides.items():
        difference = np.abs(rewards - reference)
        signs = np.sign(rewards[::2].astype(np.float64) - rewards[1::2])
        flips, ties = int((signs != order).sum()), int(((signs == 0) & (order != 0)).sum())
        table.add_row(
            name,
            f"{difference.max():.1e}",
            f"{difference.mean():.1e}",
            f"{flips}",
            f"{ties}",
            f"{flips / len(order):.2%}",
        )
    spread = float(np.abs(reference[::2] - reference[1::2]).mean())
    console.print(
        f"{len(order)} pairs; scores {reference.mean():.2f} +- {reference.std():.2f}, apart by {spread:.3f} on average"
    )
    console.print(table)


if __name__ == "__main__":
    main()
