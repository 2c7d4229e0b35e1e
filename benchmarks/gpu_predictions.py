"""What gpu_day.py should measure, computed from counts before any GPU was seen; see README.md for the arithmetic.

    python benchmarks/gpu_predictions.py --save gpu_predictions

Assumptions are the constants below: shares of the data sheet's rates that kernels of each sort reach.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import results
import workloads


@dataclass(frozen=True)
class Chip:
    """Dense FLOP/s in bfloat16 and bytes/s of memory, as published."""

    flops: float
    bandwidth: float


CHIPS = {"H100": Chip(989e12, 3.35e12), "H200": Chip(989e12, 4.8e12)}
MATMUL, ATTENTION, MEMORY = 0.75, 0.30, 0.80  # shares of the rates: products, flex attention, elementwise kernels
MATMUL_FP8 = 0.60  # of twice the rate
LAUNCH = 5e-6
KERNELS_OF_LAYER, KERNELS_OF_BATCH = 23, 25  # launches of the fused forward, counted by a dispatch mode
KEYS = 458  # that a query multiplies, in blocks of 128: mean of a batch of 32,768 tokens of GSM8K groups of 8
SLOTS = 2.18  # places in pages for each token of this batch, into which keys and values are copied
BYTES_OF_QUANTISING = 5  # for each number that one kernel rounds to fp8: read for the scale, read again, and written
DECODE_KERNELS = 40  # of a layer for one token of all rows
SAMPLING_PASSES = 8  # over the logits in float32
LOAD_BYTES = 5e9  # bytes/s from the disk cache to the GPU
LOAD_SECONDS = 10.0  # of a load besides: imports of kernels, the trial and its compilations
PROMPT = 100  # tokens of a GSM8K prompt
SCORED = ("0.6B", "4B", "8B")


@dataclass(frozen=True)
class Prediction:
    """A number by GPU, and a goal of the H200 if there is one."""

    what: str
    values: Mapping[str, float]
    goal: float | None = None


def sizes(size: str) -> tuple[int, int, int, int, int, int]:
    """Return layers, hidden size, widths of queries and keys, inner size and weights in products."""
    shape = workloads.SHAPES[size]
    layers, hidden, inner = (shape[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    queries, keys = (shape["head_dim"] * shape[name] for name in ("num_attention_heads", "num_key_value_heads"))
    return layers, hidden, queries, keys, inner, layers * (2 * hidden * (queries + keys) + 3 * hidden * inner)


def token_seconds(size: str, chip: Chip, *, fp8: bool = False) -> dict[str, float]:
    """Return the seconds of one token in a forward, by sort of kernel."""
    layers, hidden, queries, keys, inner, weights = sizes(size)
    # Numbers read and written: norms 4 hidden; of the queries norm 2, rotation 5, copied into a buffer 2; of the keys
    # norm 2 and rotation 5, with the values 4 for each place; gate times up 5.
    elements = 4 * hidden + 9 * queries + (7 + 4 * SLOTS) * keys + 5 * inner
    moved = 2 * elements + (BYTES_OF_QUANTISING * (2 * hidden + queries + inner) if fp8 else 0)
    rate = 2 * MATMUL_FP8 if fp8 else MATMUL
    return {
        "products": 2 * weights / (rate * chip.flops),
        "attention": layers * 4 * queries * KEYS / (ATTENTION * chip.flops),
        "memory": layers * moved / (MEMORY * chip.bandwidth),
    }


def tokens_per_second(size: str, tokens: int, chip: Chip, *, fp8: bool = False) -> float:
    """Return tokens/s of batches of so many tokens; launches are hidden while the kernels take longer."""
    kernels = sizes(size)[0] * KERNELS_OF_LAYER + KERNELS_OF_BATCH
    return tokens / max(tokens * sum(token_seconds(size, chip, fp8=fp8).values()), kernels * LAUNCH)


def grpo_seconds(size: str, chip: Chip, *, prompts: int, replies: int, length: int) -> dict[str, float]:
    """Return the seconds of the phases of a GRPO step with a policy and a reward model of this size in bfloat16."""
    layers, hidden, _, keys, _, weights = sizes(size)
    rows, vocabulary = prompts * replies, workloads.SHAPES[size]["vocab_size"]
    read = 2 * (weights + hidden * vocabulary) + rows * (length / 2) * layers * 2 * keys * 2
    computed = rows * 2 * (weights + hidden * vocabulary)
    sampled = SAMPLING_PASSES * 4 * rows * vocabulary
    step = read / (0.5 * chip.bandwidth) + computed / (MATMUL * chip.flops) + sampled / (MEMORY * chip.bandwidth)
    tokens = rows * length + prompts * PROMPT
    forward = tokens * sum(token_seconds(size, chip).values())
    # The logits: forward, forward again and two backwards; eight passes in float32 over them.
    logits = 8 * hidden * vocabulary / (MATMUL * chip.flops) + 8 * 4 * vocabulary / (MEMORY * chip.bandwidth)
    phases = {
        "generate": length * max(step, layers * DECODE_KERNELS * LAUNCH),
        "score": forward,
        "update": 4 * forward + rows * length * logits,  # the backward costs about three forwards
    }
    return phases | {"step": sum(phases.values())}


def predictions() -> Iterator[Prediction]:
    """Yield every prediction."""
    goals = {("0.6B", 32_768): 400e3, ("8B", 32_768): 47e3}
    for size in SCORED:
        for tokens in (8_192, 32_768, 65_536):
            values = {name: tokens_per_second(size, tokens, chip) for name, chip in CHIPS.items()}
            what = f"scoring, {size}, {tokens:,} tokens in a batch, tokens/s"
            yield Prediction(what, values, goals.get((size, tokens)))
    for size in SCORED:
        values = {name: tokens_per_second(size, 32_768, chip, fp8=True) for name, chip in CHIPS.items()}
        yield Prediction(f"scoring in fp8, {size}, tokens/s", values)
    steps = {name: grpo_seconds("0.6B", chip, prompts=64, replies=8, length=512) for name, chip in CHIPS.items()}
    for phase, goal in (("generate", None), ("score", None), ("update", None), ("step", 20.0)):
        values = {name: found[phase] for name, found in steps.items()}
        yield Prediction(f"GRPO, 0.6B, 64 x 8 replies of 512 tokens: {phase}, s", values, goal)
    _, hidden, *_, weights = sizes("8B")
    loading = 2 * (weights + hidden * workloads.SHAPES["8B"]["vocab_size"]) / LOAD_BYTES + LOAD_SECONDS
    yield Prediction("loading 8B from the disk cache, s", dict.fromkeys(CHIPS, loading))
    yield Prediction("kernels of a layer", dict.fromkeys(CHIPS, float(KERNELS_OF_LAYER)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results.add_argument(parser)
    args = parser.parse_args()
    values: dict[str, Any] = {}
    for each in predictions():
        values[each.what.replace("/s", " per second")] = {**each.values} | ({"goal": each.goal} if each.goal else {})
        print(each.what, {chip: f"{value:.4g}" for chip, value in each.values.items()})
    for size in SCORED:
        for chip, of in CHIPS.items():
            parts = token_seconds(size, of)
            values.setdefault("us of a token", {}).setdefault(size, {})[chip] = {k: 1e6 * v for k, v in parts.items()}
    results.save(args.save, values, kind="computed")


if __name__ == "__main__":
    main()
