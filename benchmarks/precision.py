"""Measure rounding errors of scores, and how often they reverse a preference.

    python benchmarks/precision.py [--pairs 200]          # gpu_day.py does the same on a GPU

The reference is the plain Hugging Face forward in float32, one conversation at a time. The other methods are the engine
of gym_rm in float32, in bfloat16 (head in float32) and with 8-bit matrix products, and the plain model in bfloat16
(head in bfloat16). A flip is a pair whose order changes or becomes a tie.

The pairs are:

- HH preference pairs from ../shared/data, with random weights. This case is hard, because random weights give the two
  replies of a pair nearly equal scores.
- Embedded prompts with a right and a wrong answer, with the embedded reward model.
"""

from __future__ import annotations

import argparse
import copy
import sys
from typing import Any

import numpy as np
import results
import scoring
import torch
import workloads
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel
from workloads import Conversation

from gym_rm.assets.number_task import candidates as number_candidates
from gym_rm.data.prompts import load_prompts
from gym_rm.engine.reward_model_scorer import RewardModelScorer, load_reward_model


def right_and_wrong(count: int) -> list[Conversation]:
    """Return pairs: an embedded prompt with its right answer, then the prompt with another of its numbers."""
    conversations: list[Conversation] = []
    for prompt in load_prompts():
        answer = f"It is {prompt.answer}."
        wrong = sorted({*number_candidates(prompt.messages)[:3]} - {answer})
        for reply in wrong:
            conversations += [[*prompt.messages, {"role": "assistant", "content": text}] for text in (answer, reply)]
    return conversations[: 2 * count]


def errors_of(
    model: PreTrainedModel, tokenizer: Any, pairs: list[Conversation]
) -> tuple[np.ndarray[Any, Any], dict[str, dict[str, float]]]:
    """Return the scores of the reference, and the errors of each method."""
    half = copy.deepcopy(model).to(torch.bfloat16)
    scorers = {
        "ours, float32": RewardModelScorer(model, tokenizer),
        "ours, bfloat16": RewardModelScorer(half, tokenizer),
        "ours, 8-bit products": scoring.quantized(model, tokenizer),
    }
    encoded = scorers["ours, float32"].renderer.encode(pairs)
    ids = [torch.from_numpy(one.input_ids.astype(np.int64))[None].to(model.device) for one in encoded]
    with torch.inference_mode():
        reference = np.array([model(one).logits.item() for one in ids])
        results = {name: scorer.score(pairs).rewards for name, scorer in scorers.items()}
        results["plain, bfloat16"] = np.array([half(one).logits.item() for one in ids])
    order = np.sign(reference[::2] - reference[1::2])
    errors = {}
    for name, rewards in results.items():
        difference = np.abs(rewards - reference)
        signs = np.sign(rewards[::2].astype(np.float64) - rewards[1::2])
        flips, ties = int((signs != order).sum()), int(((signs == 0) & (order != 0)).sum())
        errors[name] = {"largest": float(difference.max()), "mean": float(difference.mean())}
        errors[name] |= {"flips": flips, "ties": ties, "flip_rate": flips / len(order)}
    return reference, errors


def compare(
    title: str, model: PreTrainedModel, tokenizer: Any, pairs: list[Conversation], console: Console
) -> dict[str, Any]:
    """Print the errors of a model, and return them."""
    reference, errors = errors_of(model, tokenizer, pairs)
    table = Table("method", "largest difference", "mean difference", "flips", "of them ties", "flip rate")
    for name, of in errors.items():
        cells = [f"{of['largest']:.1e}", f"{of['mean']:.1e}", f"{of['flips']}", f"{of['ties']}"]
        table.add_row(name, *cells, f"{of['flip_rate']:.2%}")
    spread = float(np.abs(reference[::2] - reference[1::2]).mean())
    console.print(
        f"\n[bold]{title}[/bold]: {len(reference) // 2} pairs; scores {reference.mean():.2f} +- {reference.std():.2f}, "
        f"mean difference within a pair {spread:.3f}"
    )
    console.print(table)
    return {
        "pairs": len(reference) // 2,
        "standard deviation of scores": reference.std(),
        "mean difference within a pair": spread,
        "methods": errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1M", choices=list(workloads.SHAPES))
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    args = workloads.parse_args(parser)
    console = Console(width=140)
    console.print(f"python {' '.join(sys.argv)}\n{workloads.machine('cpu')}")
    tokenizer = workloads.tokenizer()
    model = workloads.reward_model(args.size, len(tokenizer))
    pairs = workloads.hh_groups(args.pairs, 2, first=args.first)
    found = {"HH, random weights": compare(f"HH, {args.size} random weights", model, tokenizer, pairs, console)}
    embedded = load_reward_model(device="cpu", dtype="float32")
    model, tokenizer = embedded.executor.models[0], embedded.renderer.tokenizer
    found["embedded model"] = compare("embedded", model, tokenizer, right_and_wrong(args.pairs), console)
    results.save(args.save, found)


if __name__ == "__main__":
    main()
