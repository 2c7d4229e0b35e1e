"""Count the scores whose bits depend on the batch that they were computed in.

    python benchmarks/invariance.py                   # 10,000 batches, about ten minutes on two cores
    python benchmarks/invariance.py --host            # only the time of Python in a batch, about ten seconds

24 real conversations (GSM8K groups, and HH dialogues with several turns) are each scored alone once. Then random
batches of 1 to 12 of them are scored: in random order, with repetition, with a random token budget and number of
threads, after the last or after every assistant turn, and with a prefix cache that is warm, empty or off. A score
counts as different if any of its bits differs from the score alone. The weights are random.

- `ours`: gym_rm, with four small models: a Qwen3, which the fused forward runs, a GPT-NeoX, which it does not, a
  Qwen3-MoE with experts, and a BERT.
- `padded` (transformers in one padded batch), `trl` and `s-t` (see scoring.py): other libraries on `--peer-batches` of
  these batches, compared with their own scores of each conversation alone.

`--host` runs a Qwen3 of 28 layers with tiny sizes, so that nearly all of its time is Python's: what a GPU waits
for at every batch.

If a score of ours differs, the first such score of each model is printed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import results
import scoring
import torch
import workloads
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel
from workloads import Conversation

from gym_rm.engine.backbones.batch_invariance import BatchInvariant
from gym_rm.engine.backbones.decoder import DecoderBackbone
from gym_rm.engine.backbones.invariant_products import GemmRows
from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.reward_model_scorer import RewardModelScorer
from gym_rm.engine.token_tree import TokenSequence

Floats: TypeAlias = np.ndarray[Any, Any]
SHAPE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_key_value_heads": 2}
OTHERS = {
    "gpt_neox": SHAPE,
    "qwen3_moe": SHAPE | EXPERTS | {"head_dim": 32},
    "bert": SHAPE | {"max_position_embeddings": 2048},
}
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NAMES = {  # of models and methods, in the results
    "qwen3": "Qwen3, fused",
    "gpt_neox": "GPT-NeoX, not fused",
    "qwen3_moe": "Qwen3-MoE, 8 experts",
    "bert": "BERT",
}
METHODS = {"padded": "transformers, padded", "trl": "TRL", "s-t": "sentence-transformers"}
PEERS = {"trl": ("trl", scoring.trl), "s-t": ("sentence_transformers", scoring.sentence_transformers)}


@dataclass(frozen=True)
class Batch:
    """One random batch: indices of conversations, and how to score them."""

    rows: list[int]
    budget: int
    threads: int
    turns: str
    cache: str


Score: TypeAlias = Callable[[Batch | int], list[Floats]]  # scores a batch, or one conversation alone


def short_conversations(first: int) -> list[Conversation]:
    """Return 12 replies to GSM8K problems and 12 dialogues of several turns, all shorter than 900 characters."""
    dialogues = [dialogue for dialogue in workloads.hh_groups(200, 2, first=first) if len(dialogue) >= 4]
    short = [
        [conversation for conversation in some if sum(len(message["content"]) for message in conversation) < 900]
        for some in (workloads.gsm8k_groups(20, 4, first=first), dialogues)
    ]
    return short[0][:12] + short[1][:12]


def make_model(name: str, vocab_size: int) -> PreTrainedModel:
    if name == "qwen3":
        return workloads.reward_model("1M", vocab_size)
    settings = {"vocab_size": vocab_size, "num_labels": 1, "pad_token_id": 2, "initializer_range": 0.05}
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **settings, **OTHERS[name])
    return AutoModelForSequenceClassification.from_config(config).eval()


def random_batches(count: int, conversations: int, args: argparse.Namespace) -> list[Batch]:
    rng = np.random.default_rng(args.seed)
    return [
        Batch(
            rows=rng.integers(conversations, size=rng.integers(1, 13)).tolist(),
            budget=int(512 * 2 ** rng.uniform(0, 3)),
            threads=int(rng.choice([1, args.threads])),
            turns=str(rng.choice(["last", "all"])),
            cache=str(rng.choice(["warm", "empty", "off"])),
        )
        for _ in range(count)
    ]


def ours(scorer: RewardModelScorer, cached: RewardModelScorer | None, conversations: Sequence[Conversation]) -> Score:
    """Return a function that scores a batch, or the turns of one conversation, each turn alone."""

    def score(batch: Batch | int) -> list[Floats]:
        if isinstance(batch, int):
            whole = conversations[batch]
            ends = [end + 1 for end, message in enumerate(whole) if message["role"] == "assistant"]
            return [np.concatenate([scorer.score([whole[:end]]).rewards for end in ends])]
        chosen = scorer if cached is None or batch.cache == "off" else cached
        if batch.cache == "empty":
            chosen.clear_cache()
        chosen._scheduler.budget = batch.budget
        scores = chosen.score([conversations[row] for row in batch.rows], turns=batch.turns)  # type: ignore[arg-type]
        return list(scores.rewards[:, None] if scores.turn_rewards is None else scores.turn_rewards)

    return score


def peer(method: scoring.Method, conversations: Sequence[Conversation]) -> Score:
    def score(batch: Batch | int) -> list[Floats]:
        rows = [batch] if isinstance(batch, int) else batch.rows
        return list(method([conversations[row] for row in rows])[:, None].astype(np.float64))

    return score


def compare(score: Score, batches: Sequence[Batch], count: int) -> tuple[dict[str, float], str]:
    """Return the numbers of a row of the table, and a description of the first difference, empty if there is none."""
    alone = [score(row)[0] for row in range(count)]
    compared, different, largest, first, started = 0, 0, 0.0, "", time.perf_counter()
    for batch in batches:
        torch.set_num_threads(batch.threads)
        for row, got in zip(batch.rows, score(batch), strict=True):
            expected = alone[row][-len(got) :]
            bits = expected.view(np.int64) != got.view(np.int64)
            if bits.any() and not first:
                first = f"conversation {row} has {expected} alone, {got} in {batch}"
            compared, different = compared + len(got), different + int(bits.sum())
            largest = max(largest, float(np.abs(got - expected).max()))
    torch.set_num_threads(os.cpu_count() or 1)
    found = {"batches": len(batches), "scores": compared, "other bits": different, "share": different / compared}
    return found | {"largest difference": largest, "seconds": time.perf_counter() - started}, first


def cells_of(found: dict[str, float]) -> list[str]:
    """Return the numbers of a row as text."""
    counts = [f"{found[name]}" for name in ("batches", "scores", "other bits")]
    return [*counts, f"{found['largest difference']:.1e}", f"{found['seconds']:.0f}"]


def host_time(console: Console) -> None:
    """Print the processor time of a batch of 48 tokens: alone, and with products of several numbers of rows."""
    torch.set_num_threads(1)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model("qwen3", vocab_size=100, num_hidden_layers=28, head_dim=8, num_labels=1, **sizes)
    decoder = DecoderBackbone(AutoModelForSequenceClassification.from_config(config).eval())
    sequence = TokenSequence(np.arange(48, dtype=np.int32), np.array([47]))
    (tree,) = plan_trees([sequence], max_num_batched_tokens=48).batches
    table = Table("products", "milliseconds of a batch")
    rows = (None, GemmRows(), GemmRows(16, in_chunks=True))
    times: dict[GemmRows | None, list[float]] = {each: [] for each in rows}
    for _ in range(100):  # in turns, because the speed of a machine changes
        for each in rows:
            with torch.inference_mode(), contextlib.nullcontext() if each is None else BatchInvariant(each):
                started = time.process_time()
                decoder.hidden_states(tree)
                times[each].append(1e3 * (time.process_time() - started))
    for each, measured in times.items():
        table.add_row("of torch" if each is None else str(each), f"{np.median(measured):.1f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=10_000, help="number of batches, divided among the models")
    parser.add_argument("--peer-batches", type=int, default=200, help="number of batches of each other library")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="a batch runs with one or so many threads")
    parser.add_argument("--first", type=int, default=0, help="index of the first data row, to measure on other rows")
    parser.add_argument("--only", default="", help="run only models whose name contains this text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--host", action="store_true", help="measure the time of Python in a batch")
    args = workloads.parse_args(parser)
    console = Console(width=160)
    console.print(f"python {' '.join(sys.argv)}\n{workloads.machine('cpu')}")
    if args.host:
        host_time(console)
        return
    tokenizer = workloads.tokenizer()
    conversations = short_conversations(args.first)
    table = Table("model", "precision", "method", "layout", "batch_invariance")
    for heading in ("batches", "scores", "other bits", "largest difference", "seconds"):
        table.add_column(heading, justify="right")
    cases = [(name, precision) for name in ("qwen3", *OTHERS) for precision in PRECISIONS]
    batches = random_batches(-(-args.batches // len(cases)), len(conversations), args)
    differences = []
    values: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for name, precision in track(cases, "models", console=console, transient=True):
        if args.only not in name:
            continue
        model = make_model(name, len(tokenizer)).to(PRECISIONS[precision])
        scorer = scoring.loaded(model, tokenizer)
        cached = scoring.loaded(model, tokenizer, prefix_cache_tokens=2048) if name == "qwen3" else None
        numbers, first = compare(ours(scorer, cached, conversations), batches, len(conversations))
        differences += [f"{name}, {precision}: {first}"] if first else []
        table.add_row(name, precision, "ours", scorer.layout, scorer.provenance.batch_invariance, *cells_of(numbers))
        of_case = values.setdefault(NAMES[name], {}).setdefault(precision, {"gym_rm": numbers})
        methods = {"padded": scoring.padded(model, tokenizer, sort=False)}
        for method, (module, make) in PEERS.items():
            if name == "qwen3" and importlib.util.find_spec(module):
                methods[method] = make(model, tokenizer)
        for method, score in methods.items():
            of_case[METHODS[method]], _ = compare(
                peer(score, conversations), batches[: args.peer_batches], len(conversations)
            )
            table.add_row(name, precision, method, "", "", *cells_of(of_case[METHODS[method]]))
    console.print(table)
    results.save(args.save, values)
    sys.exit("\n".join(differences) or 0)


if __name__ == "__main__":
    main()
