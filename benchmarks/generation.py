"""Measure how fast replies are sampled, beside `generate` of transformers and beside the rates of the hardware.

    python benchmarks/generation.py [--only "25M, 4 x 8"] [--new-tokens 64] [--rounds 3] [--threads 2]

Both sample replies of exactly `--new-tokens` tokens at temperature 1 to prompts of GSM8K, with random weights in
float32 and no end token, and alternate in one process. transformers pads the prompts on the left, in one batch. A case
is a shape and prompts x rows of each prompt.

The floor is the time of the matrix products alone: the weights of the model, packed as in decoding, applied to the
tokens of the distinct prompts and then to all rows once for each new token but the first, each weight in its turn, so
that weights that do not fit in the caches come from memory. Attention, norms and draws are not in it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import results
import torch
import workloads
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config

from gym_rm.generation.completions import TokenIds
from gym_rm.generation.sampling import LocalSampler

SHAPES = {
    "12M": {"hidden_size": 320, "num_hidden_layers": 8, "intermediate_size": 1024, "num_attention_heads": 4}
    | {"num_key_value_heads": 4, "head_dim": 80},
    "25M": workloads.SHAPES["25M"],
    "60M": {"hidden_size": 768, "num_hidden_layers": 10, "intermediate_size": 2048, "num_attention_heads": 12}
    | {"num_key_value_heads": 2, "head_dim": 64},
}
CASES = {
    f"{shape}, {prompts} x {rows}": (shape, prompts, rows)
    for shape, prompts, rows in (
        ("25M", 4, 8),
        ("25M", 32, 1),
        ("25M", 1, 4),
        ("25M", 16, 8),
        ("12M", 4, 8),
        ("60M", 4, 8),
    )
}


def policy(shape: str, tokenizer: Any) -> Any:
    """Return a causal language model with random weights that never ends a reply."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=len(tokenizer), **SHAPES[shape], pad_token_id=tokenizer.pad_token_id, eos_token_id=None,
        bos_token_id=None, max_position_embeddings=2048,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def prompts_of(tokenizer: Any, count: int) -> list[TokenIds]:
    """Return the token ids of different problems."""
    questions = [[{"role": "user", "content": row["question"]}] for row in workloads.rows("gsm8k_graded")[:count]]
    rendered = tokenizer.apply_chat_template(questions, add_generation_prompt=True)["input_ids"]
    return [np.array(ids, dtype=np.int32) for ids in rendered]


def ours(model: Any, tokenizer: Any, rows: list[TokenIds], new_tokens: int) -> Callable[[], int]:
    sampler = LocalSampler(model, tokenizer, max_new_tokens=new_tokens)
    sampler.ends = []
    return lambda: sum(len(reply.token_ids) for reply in sampler.sample(rows, seeds=range(len(rows))))


def transformers(model: Any, tokenizer: Any, rows: list[TokenIds], new_tokens: int) -> Callable[[], int]:
    batch = tokenizer.pad({"input_ids": [row.tolist() for row in rows]}, return_tensors="pt", padding_side="left")
    options = {"max_new_tokens": new_tokens, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return lambda: model.generate(**batch, **options).numel() - batch["input_ids"].numel()


def products(model: Any, prompts: list[TokenIds], rows: int, new_tokens: int) -> Callable[[], int]:
    """Return the matrix products of a generation."""
    layers = [layer.weight.detach() for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    packed = [(torch.ops.mkldnn._reorder_linear_weight(weight), weight.shape[1]) for weight in layers]
    *body, _ = packed

    @torch.inference_mode()
    def run() -> int:
        for count, weights in (
            (sum(map(len, prompts)), body),
            (len(prompts), packed[-1:]),
            *[(rows, packed)] * (new_tokens - 1),
        ):
            inputs = {size: torch.ones(count, size) for _, size in packed}
            for weight, size in weights:
                torch.ops.mkldnn._linear_pointwise(inputs[size], weight, None, "none", [], "")
        return rows * new_tokens

    return run


def measure(case: str, args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    shape, count, group = CASES[case]
    model, prompts = policy(shape, tokenizer), prompts_of(tokenizer, count)
    rows = [prompt for prompt in prompts for _ in range(group)]
    methods = {
        "gym_rm": ours(model, tokenizer, rows, args.new_tokens),
        "transformers": transformers(model, tokenizer, rows, args.new_tokens),
        "products": products(model, prompts, len(rows), args.new_tokens),
    }
    for work in methods.values():  # warm-up
        assert work() == len(rows) * args.new_tokens
    clock = time.process_time if args.threads == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(args.rounds):
        for name, work in methods.items():
            start = clock()
            work()
            seconds[name].append(clock() - start)
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "rows": len(rows),
        "prompt tokens": sum(map(len, prompts)),
        "seconds": median,
        "times": statistics.median(np.divide(seconds["transformers"], seconds["gym_rm"]).tolist()),
        "of floor": statistics.median(np.divide(seconds["gym_rm"], seconds["products"]).tolist()),
        "tokens per second": len(rows) * args.new_tokens / median["gym_rm"],
        "step MB": 4e-6 * weights,
        "step GFLOP": 2e-9 * weights * len(rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="cases to run")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="with one, seconds are those of the processor")
    args = workloads.parse_args(parser)
    torch.set_num_threads(args.threads)
    console, tokenizer = Console(width=160), workloads.tokenizer()
    console.print(f"python {' '.join(sys.argv)}\n{workloads.machine('cpu')}")
    table = Table(
        "case", "prompt tokens", "gym_rm s", "transformers s", "products s", "tokens/s", "transformers / gym_rm"
    )
    values: dict[str, Any] = {}
    for case in args.only:
        values[case] = found = measure(case, args, tokenizer)
        seconds = [f"{value:.2f}" for value in found["seconds"].values()]
        rates = f"{found['tokens per second']:.0f}", f"{found['times']:.2f}"
        table.add_row(case, f"{found['prompt tokens']}", *seconds, *rates)
    console.print(table)
    results.save(args.save, values)


if __name__ == "__main__":
    main()
