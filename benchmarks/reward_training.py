"""Train reward models with gym_rm and with TRL's RewardTrainer: speed, losses, held-out accuracy, memory.

    python benchmarks/reward_training.py speed [--size 25M] [--rows hh gsm8k]
    python benchmarks/reward_training.py parity [--size 1M] [--steps 50]
    python benchmarks/reward_training.py accuracy [--seeds 0 1 2]
    python benchmarks/reward_training.py memory [--size 25M]

Both start from the same random weights and read the same pairs with the same template, in float32 without dropout. Both
use fused AdamW (no weight decay, betas 0.9 and 0.999), clip the gradient norm to 1 and lower the learning rate linearly
without warm-up. TRL runs without gradient checkpointing, logging, evaluation and checkpoints. Its batches are those of
transformers' `group_by_length` over the whole data, and ours are the same: pairs of one length in a batch is what a
padded forward likes best. Loading and tokenisation are not timed. `trl micro` accumulates the gradients of a step over
forwards of `--micro-batch` pairs, which pads less; the other methods of TRL run a step in one forward.

Pairs are the replies of HH harmless, and for each GSM8K question that has both, its last correct and last wrong
solution (the largest model is last). Left out are three pairs of HH with an empty reply, and pairs with a conversation
that is longer than `--max-length`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import results
import torch
import transformers
import workloads
from reward_trainers import Job, Pair, Run, train, train_ours, train_trl
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForSequenceClassification, BertConfig, PreTrainedModel
from transformers.trainer_pt_utils import get_length_grouped_indices

from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.token_tree import TokenSequence
from gym_rm.types import Message

DATA = {"hh": "HH harmless", "gsm8k": "GSM8K graded"}
METHODS = {
    "ours": "gym_rm",
    "ours padded": "gym_rm, batch.tree=false",
    "trl": "TRL, length grouping",
    "trl micro": "TRL, length grouping, small forwards",
    "trl random": "TRL, random order",
}


# --- data and models --------------------------------------------------------------------------------------------------


def read_pairs(name: str, tokenizer: Any, args: argparse.Namespace) -> list[Pair]:
    if name == "hh":
        rows = workloads.rows("hh_harmless")
        ranked = [sorted(row["completions"], key=lambda completion: completion["rank"]) for row in rows]
        pairs = [
            Pair(row["context"], better["completion"], worse["completion"])
            for row, (better, worse) in zip(rows, ranked, strict=True)
        ]
    else:
        pairs = []
        for row in workloads.rows("gsm8k_graded"):
            of = {solution["correct"]: solution["text"] for solution in row["solutions"]}  # the last of each
            if len(of) == 2:
                replies: list[list[Message]] = [
                    [{"role": "assistant", "content": of[right]}] for right in (True, False)
                ]
                pairs.append(Pair([{"role": "user", "content": row["question"]}], *replies))
    pairs = [pair for pair in pairs if all(reply[-1]["content"] for reply in (pair.chosen, pair.rejected))]
    conversations = [pair.prompt + reply for pair in pairs for reply in (pair.chosen, pair.rejected)]
    ids = tokenizer.apply_chat_template(conversations, return_dict=True)["input_ids"]
    pairs = [replace(pair, ids=(ids[2 * row], ids[2 * row + 1])) for row, pair in enumerate(pairs)]
    return [pair for pair in pairs if pair.longest <= args.max_length][: args.limit]


def save_model(folder: Path, model: PreTrainedModel, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def fresh(config: Any, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_config(config)


def bert(vocab_size: int, max_length: int) -> BertConfig:
    """Return an encoder with 2M weights, whose head reads the first token."""
    return BertConfig(
        vocab_size=vocab_size, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512,
        max_position_embeddings=max_length, type_vocab_size=1, num_labels=1, pad_token_id=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


# --- the modes --------------------------------------------------------------------------------------------------------


def grouped_order(pairs: Sequence[Pair], batch_size: int) -> list[int]:
    """Return the order of one epoch of transformers' `group_by_length`."""
    generator = torch.Generator().manual_seed(0)
    return get_length_grouped_indices([pair.longest for pair in pairs], batch_size, generator=generator)


def grouped(pairs: Sequence[Pair], *, batch_size: int, steps: int) -> list[Pair]:
    """Return the pairs of some batches of that order, evenly spaced."""
    order = grouped_order(pairs, batch_size)
    batches = [order[start : start + batch_size] for start in range(0, len(order) - batch_size + 1, batch_size)]
    # An offset of half a stride, or else the batch that is moved to the front because it is the longest is always in.
    chosen = (np.arange(min(steps, len(batches))) + 0.5) * len(batches) / min(steps, len(batches))
    return [pairs[row] for number in chosen.astype(int) for row in batches[number]]


def padding(pairs: Sequence[Pair], order: Sequence[int], size: int) -> float:
    """Return the tokens of padded forwards of `size` pairs, divided by the tokens of the pairs."""
    forwards = [[pairs[row] for row in order[start : start + size]] for start in range(0, len(order), size)]
    padded = sum(2 * len(each) * max(pair.longest for pair in each) for each in forwards)
    return padded / sum(len(ids) for pair in pairs for ids in pair.ids)


def counts(pairs: Sequence[Pair]) -> dict[str, float]:
    """Return the numbers of pairs, of their tokens, and of those that are left if a pair shares its prompt."""
    sequences = [TokenSequence(np.array(ids, dtype=np.int32), np.array([len(ids) - 1])) for p in pairs for ids in p.ids]
    total = sum(len(each.input_ids) for each in sequences)
    unique = sum(
        plan_trees(sequences[row : row + 2], max_num_batched_tokens=10**6).num_tokens
        for row in range(0, len(sequences), 2)
    )
    return {"pairs": len(pairs), "tokens": total, "unique tokens": unique, "tokens per unique token": total / unique}


def describe(name: str, pairs: Sequence[Pair], batch_size: int) -> str:
    of = counts(pairs)
    return (
        f"{name}: {len(pairs)} pairs in steps of {batch_size}, {of['tokens']} tokens, {of['unique tokens']} unique "
        f"({of['tokens per unique token']:.2f} times fewer), longest conversation {max(each.longest for each in pairs)}"
    )


def speed(args: argparse.Namespace, console: Console, tokenizer: Any, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    save_model(folder, workloads.reward_model(args.size, len(tokenizer)), tokenizer)
    for name in args.rows:
        every = read_pairs(name, tokenizer, args)
        order, random = grouped_order(every, args.batch_size), np.random.default_rng(1).permutation(len(every)).tolist()
        console.print(
            f"{describe(name, every, args.batch_size)}; padded / tokens: length grouping "
            f"{padding(every, order, args.batch_size):.2f}, forwards of {args.micro_batch} pairs "
            f"{padding(every, order, args.micro_batch):.2f}, "
            f"random order {padding(every, random, args.batch_size):.2f}"
        )
        pairs = grouped(every, batch_size=args.batch_size, steps=args.steps)
        job = Job(folder, pairs, args.batch_size, args.learning_rate, args.micro_batch)
        console.print(describe(f"measured on {name}", pairs, args.batch_size))
        found[DATA[name]] = {
            "whole": counts(every)
            | {
                "padded in a step": padding(every, order, args.batch_size),
                "padded in small forwards": padding(every, order, args.micro_batch),
                "padded in random order": padding(every, random, args.batch_size),
            },
            "measured": counts(pairs),
        }
        times: dict[str, list[Run]] = {method: [] for method in args.methods}
        for number in range(args.rounds):
            for method, runs in times.items():
                runs.append(replace(train(method, job), model=None))
            seconds = ", ".join(
                f"{name} {runs[-1].processor:.1f} ({runs[-1].wall:.1f})" for name, runs in times.items()
            )
            console.print(f"round {number + 1}, seconds of processor (wall) time: {seconds}")
        table = Table("", "pairs/s of processor time", "time / ours", "pairs/s of wall time", "time / ours")
        medians = {
            method: [statistics.median(getattr(run, clock) for run in runs) for clock in ("processor", "wall")]
            for method, runs in times.items()
        }
        for method, of_method in medians.items():
            cells = [
                cell
                for taken, ours in zip(of_method, medians[args.methods[0]], strict=True)
                for cell in (f"{len(pairs) / taken:.2f}", f"{taken / ours:.2f}")
            ]
            table.add_row(METHODS[method], *cells)
        found[DATA[name]]["methods"] = {
            METHODS[method]: {
                "seconds of processor time": taken,
                "pairs per second": len(pairs) / taken,
                "times": taken / medians[args.methods[0]][0],
            }
            for method, (taken, _) in medians.items()
        }
        console.print(table)
    return found


def parity(args: argparse.Namespace, console: Console, tokenizer: Any, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    save_model(folder, workloads.reward_model(args.size, len(tokenizer)), tokenizer)
    table = Table(
        "data", "steps", "pairs", "loss, first", "loss, last", "mean difference", "largest difference", "at step"
    )
    for name in args.rows:
        pairs = itertools.cycle(read_pairs(name, tokenizer, args))
        repeated = list(itertools.islice(pairs, args.steps * args.batch_size))
        job = Job(folder, repeated, args.batch_size, args.learning_rate, args.micro_batch)
        ours, theirs = train_ours(job).losses, train_trl(job).losses
        differences = np.abs(np.array(ours) - theirs)
        table.add_row(
            name, f"{len(ours)}", f"{len(repeated)}", f"{ours[0]:.6f}", f"{ours[-1]:.6f}", f"{differences.mean():.1e}",
            f"{differences.max():.1e}", f"{differences.argmax() + 1}",
        )  # fmt: skip
        found[DATA[name]] = {
            "steps": len(ours),
            "first loss": ours[0],
            "last loss": ours[-1],
            "mean difference": differences.mean(),
            "largest difference": differences.max(),
        }
    console.print(table)
    return found


@torch.no_grad()
def margins(model: PreTrainedModel, pairs: Sequence[Pair]) -> np.ndarray[Any, Any]:
    """Return chosen minus rejected reward of each pair, by the plain forward of transformers."""
    rewards = [float(model(torch.tensor([ids])).logits) for pair in pairs for ids in pair.ids]
    return np.array(rewards[::2]) - np.array(rewards[1::2])


def accuracy(args: argparse.Namespace, console: Console, tokenizer: Any, folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    table = Table("data", "model", "seed", "gym_rm", "TRL", "decided alike", "largest difference of margins")
    models = {
        "Qwen3 2M": workloads.reward_model("1M", len(tokenizer)).config,
        "BERT 2M": bert(len(tokenizer), args.max_length),
    }
    for name, (label, config) in itertools.product(args.rows, models.items()):
        every = read_pairs(name, tokenizer, args)
        found: dict[str, list[np.ndarray[Any, Any]]] = {"ours": [], "trl": []}
        for seed in args.seeds:
            random = np.random.default_rng(seed)
            save_model(folder, fresh(config, seed), tokenizer)
            held_out, pairs = every[: len(every) // 4], every[len(every) // 4 :]
            orders = [random.permutation(len(pairs)) for _ in range(args.epochs)]
            ordered = [pairs[row] for row in np.concatenate(orders).tolist()]
            ordered = ordered[: len(ordered) // args.batch_size * args.batch_size]
            job = Job(folder, ordered, args.batch_size, args.learning_rate)
            ours, theirs = (margins(train(method, job).model, held_out) for method in ("ours", "trl"))
            found["ours"].append(ours)
            found["trl"].append(theirs)
            table.add_row(
                name, label, f"{seed}", f"{(ours > 0).mean():.3f}", f"{(theirs > 0).mean():.3f}",
                f"{((ours > 0) == (theirs > 0)).mean():.3f}", f"{np.abs(ours - theirs).max():.1e}",
            )  # fmt: skip
        margins_of = {method: np.array(each) for method, each in found.items()}
        intervals = {method: interval(each > 0) for method, each in margins_of.items()}
        shown = (f"{of['mean']:.3f} ({of['low']:.3f} to {of['high']:.3f})" for of in intervals.values())
        table.add_row(name, label, "all", *shown, "", f"{len(held_out)} pairs")
        alike = (margins_of["ours"] > 0) == (margins_of["trl"] > 0)
        values.setdefault(DATA[name], {})[label] = {
            "held-out pairs": len(held_out),
            "trained pairs": len(pairs),
            "seeds": len(args.seeds),
            "gym_rm": intervals["ours"],
            "TRL": intervals["trl"],
            "decided alike": alike.mean(),
            "largest difference of margins": np.abs(margins_of["ours"] - margins_of["trl"]).max(),
        }
    console.print(table)
    return values


def interval(right: np.ndarray[Any, Any]) -> dict[str, float]:
    """Return the mean of `[seeds, pairs]` and its 95 % interval by resampling pairs."""
    rows = np.random.default_rng(0).integers(right.shape[1], size=(2000, right.shape[1]))
    low, high = np.quantile(right.mean(axis=0)[rows].mean(axis=1), [0.025, 0.975])
    return {"mean": float(right.mean()), "low": float(low), "high": float(high)}


def status(name: str) -> float:
    """Return VmRSS or VmHWM of this process in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def memory(args: argparse.Namespace, console: Console, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Run every method in a process of its own; its peak resident memory is that above the memory after the imports."""
    found: dict[str, Any] = {}
    table = Table("data", "method", "after imports MiB", "peak MiB", "peak above imports MiB")
    for name, method in itertools.product(args.rows, args.methods):
        command = [sys.executable, __file__, "memory", "--worker", method, "--rows", name]
        command += ["--data", str(args.data)]
        for option in ("size", "batch_size", "steps", "max_length", "micro_batch", "threads", "limit"):
            if getattr(args, option) is not None:
                command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        before, peak = json.loads(out.splitlines()[-1])
        table.add_row(name, METHODS[method], f"{before:.0f}", f"{peak:.0f}", f"{peak - before:.0f}")
        found.setdefault(DATA[name], {})[METHODS[method]] = {"after imports MiB": before, "MiB": peak - before}
    console.print(table)
    return found


def measure_memory(args: argparse.Namespace, tokenizer: Any, folder: Path) -> None:
    import datasets  # noqa: F401
    import trl  # noqa: F401

    save_model(folder, workloads.reward_model(args.size, len(tokenizer)), tokenizer)
    pairs = read_pairs(args.rows[0], tokenizer, args)
    pairs = grouped(pairs, batch_size=args.batch_size, steps=args.steps)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    train(args.worker, Job(folder, pairs, args.batch_size, args.learning_rate, args.micro_batch))
    print(json.dumps([before, status("VmHWM")]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = {"speed": speed, "parity": parity, "accuracy": accuracy, "memory": memory}
    parser.add_argument("mode", choices=list(modes))
    parser.add_argument("--size", help="25M; 1M for parity", choices=list(workloads.SHAPES))
    parser.add_argument("--rows", nargs="+", default=["hh", "gsm8k"], choices=["hh", "gsm8k"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--batch-size", type=int, help="pairs in a step; 16, 4 for parity, 8 for accuracy")
    parser.add_argument("--micro-batch", type=int, help="pairs in a forward of `trl micro`; 4")
    parser.add_argument("--steps", type=int, help="steps of a run; 4, or 50 for parity")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each method, in alternation")
    parser.add_argument("--learning-rate", type=float, help="1e-4; 5e-4 for accuracy")
    parser.add_argument("--epochs", type=int, default=1, help="of accuracy")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of accuracy")
    parser.add_argument("--max-length", type=int, help="tokens of a conversation; 1024, or 256 for accuracy")
    parser.add_argument("--limit", type=int, help="use only the first pairs of the data")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--worker", choices=list(METHODS), help=argparse.SUPPRESS)
    args = workloads.parse_args(parser)
    of_mode = {
        "parity": {"size": "1M", "batch_size": 4, "steps": 50},
        "accuracy": {"batch_size": 8, "max_length": 256, "learning_rate": 5e-4},
    }
    defaults = {
        "size": "25M",
        "batch_size": 16,
        "steps": 4,
        "micro_batch": 4,
        "max_length": 1024,
        "learning_rate": 1e-4,
    }
    for option, value in (defaults | of_mode.get(args.mode, {})).items():
        if getattr(args, option) is None:
            setattr(args, option, value)
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    tokenizer = workloads.tokenizer()
    with tempfile.TemporaryDirectory() as name:
        if args.worker:
            measure_memory(args, tokenizer, Path(name))
            return
        console = Console(width=140)
        libraries = ", ".join(f"{library} {version(library)}" for library in ("trl", "accelerate"))
        console.print(f"python {' '.join(sys.argv)}\n{workloads.machine('cpu')}, {libraries}")
        results.save(args.save, modes[args.mode](args, console, tokenizer, Path(name)), peers=["trl"])


if __name__ == "__main__":
    main()
