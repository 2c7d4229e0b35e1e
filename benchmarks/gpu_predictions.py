"""What gpu_first.py and gpu_day.py should measure, computed from counts before any GPU was seen; see README.md.

    python benchmarks/gpu_predictions.py --save gpu_predictions

Assumptions are the constants below. Counted are launches, numbers that elementwise kernels read and write, blocks of
norms, and tiles of attention over trees of groups of 8. Not one of these numbers was measured on a GPU.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import results
import workloads

from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.pages import make_pages
from gym_rm.engine.token_tree import TokenSequence, TokenTree

Times: TypeAlias = dict[str, float]


@dataclass(frozen=True)
class Chip:
    """Ceilings: FLOP/s of large products in bfloat16, bytes/s of a copy, and FLOP/s of the data sheet."""

    products: float
    copies: float
    sheet: float = 989e12


@dataclass(frozen=True)
class Variant:
    """A forward: positions of a page of flex_attention (None: the path kernel), and whether elementwise work is fused.

    `launches` are those of a layer; the floor has all ceilings and multiplies only the keys that a query attends to.
    """

    page: int | None
    fused: bool
    launches: int
    floor: bool = False


CHIPS = {"H100": Chip(798e12, 3.0e12), "H200": Chip(785e12, 4.3e12)}
VARIANTS = {
    "pages of 128": Variant(128, fused=False, launches=23),
    "pages of 64": Variant(64, fused=False, launches=23),
    "fused kernels": Variant(64, fused=True, launches=16),  # of which three copy queries, keys and values
    "path kernel": Variant(None, fused=True, launches=13),
    "floor": Variant(None, fused=True, launches=13, floor=True),
}
K_HALF = 200  # a product of K numbers a row reaches K / (K + 200) of the ceiling
FP8 = 0.80  # of twice the rate of products in bfloat16
ELEMENTWISE = 0.85  # of the rate of copies
ATTENTION = {128: 0.28, 64: 0.25, None: 0.30}  # of the data sheet, by page
NORM_BLOCKS = 1.41e9  # blocks/s of torch's norm of a head, which has a block for each row of 128 numbers
PATH_TILE = (64, 64)  # rows (positions times heads that share a key head) and keys of a tile of the path kernel
BYTES_OF_QUANTISING = 5  # for each number that one kernel rounds to fp8: read for the scale, read again, and written
BATCH = 32_768  # tokens

TEXT, THREADS = 58e-3 / 30_000, 8  # seconds to render and tokenise a token with one thread; threads beside the device
PLAN = 5e-3 / 30_000  # seconds to plan a token: trees and masks

TRAINED_BYTES = {
    "0.6B": 937e3,
    "8B": 2256e3,
}  # a token and layer, elementwise, forward and backward, by a dispatch mode
TRAINED_LAUNCHES = {
    "torch alone": 155,
    "fused": 58,
}  # of a layer; fused: 13 forward, 14 products, 11 sums over passes, 20
ATTENTION_BACKWARD = 2.5  # forwards

DECODE_LAUNCHES, LAUNCH = 28, 10e-6  # of a layer, for one token of all rows; seconds of the host for one in eager mode
DECODE = 0.65  # of the rate of copies, at which weights, keys and values are read; a group shares those of its prompt
SAMPLING_PASSES = 8  # over the logits in float32

LOAD_BYTES = 5e9  # bytes/s from the disk cache to the GPU
LOAD_SECONDS = 10.0  # of a load besides: imports of kernels, the trial and its compilations
GSM8K, GRPO = (100, 130), (100, 512)  # mean tokens of a prompt and of a reply
SCORED = ("0.6B", "4B", "8B")


# --- geometry ---------------------------------------------------------------------------------------------------------


@functools.cache
def tree_of(lengths: tuple[int, int]) -> TokenTree:
    """Return a batch of groups of 8 replies whose lengths are 0.5 to 1.5 times the means."""
    random, sequences, tokens = np.random.default_rng(0), [], 0
    while tokens < BATCH:
        sizes = [int(mean * random.uniform(0.5, 1.5)) for mean in (lengths[0], *[lengths[1]] * 8)]
        prompt, *replies = np.split(np.arange(tokens, tokens + sum(sizes)), np.cumsum(sizes)[:-1])  # no two are equal
        ids = [np.concatenate([prompt, reply]).astype(np.int32) for reply in replies]
        sequences += [TokenSequence(each, np.array([len(each) - 1])) for each in ids]
        tokens += sum(sizes)
    (tree,) = plan_trees(sequences, max_num_batched_tokens=2 * BATCH).batches
    return tree


@functools.cache
def keys_of(lengths: tuple[int, int], page: int | None, group: int) -> tuple[float, float, float]:
    """Return for a token: keys that it attends to, keys in the tiles that it is multiplied with, places in pages."""
    tree = tree_of(lengths)
    tokens, ideal = len(tree), float(tree.depths.mean() + 1)
    if page is not None:
        pages = make_pages(tree, page)
        start = np.arange(0, tokens, page)[:, None]
        tiles = ((pages.first < start + page) & (tree.subtree_end[pages.tokens[:, -1]] > start)).sum()
        return ideal, float(tiles * page**2 / tokens), pages.tokens.size / tokens
    rows, width = PATH_TILE[0] // group, PATH_TILE[1]
    starts = np.flatnonzero(tree.parents != np.arange(-1, tokens - 1))
    stops = np.append(starts[1:], tokens)
    last = [
        min(at + rows, stop) - 1 for first, stop in zip(starts, stops, strict=True) for at in range(first, stop, rows)
    ]
    return ideal, float((rows * width * (tree.depths[last] // width + 1)).sum() / tokens), 0.0


# --- seconds ----------------------------------------------------------------------------------------------------------


def sizes(size: str) -> tuple[int, int, int, int, int]:
    """Return layers, hidden size, widths of queries and keys, and inner size."""
    shape = workloads.SHAPES[size]
    layers, hidden, inner = (shape[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    queries, keys = (shape["head_dim"] * shape[name] for name in ("num_attention_heads", "num_key_value_heads"))
    return layers, hidden, queries, keys, inner


def weights(size: str) -> int:
    """Return the weights in the products of all layers."""
    layers, hidden, queries, keys, inner = sizes(size)
    return layers * (2 * hidden * (queries + keys) + 3 * hidden * inner)


def product_nanoseconds(size: str, chip: Chip, *, fp8: bool, floor: bool) -> float:
    """Return nanoseconds of a token in the products of a layer."""
    _, hidden, queries, keys, inner = sizes(size)
    shapes = [(queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]
    ceiling = chip.products * (2 if fp8 and floor else 2 * FP8 if fp8 else 1)
    return sum(2e9 * n * k / ceiling * (1 if floor else (k + K_HALF) / k) for n, k in shapes)


def nanoseconds(
    size: str, chip: Chip, variant: Variant, *, fp8: bool = False, lengths: tuple[int, int] = GSM8K
) -> Times:
    """Return nanoseconds of a token in a layer, by class of kernel."""
    _, hidden, queries, keys, inner = sizes(size)
    ideal, multiplied, slots = keys_of(lengths, variant.page, queries // keys)
    # Numbers read and written. Residuals are added by the products.
    norms = 4 * hidden + (2 if variant.fused else 5) * (queries + keys)
    activation = (3 if variant.fused else 5) * inner
    copies = 0.0 if variant.page is None else 2 * queries + 4 * slots * keys  # into buffers and slots
    quantising = BYTES_OF_QUANTISING * (2 * hidden + queries + inner) if fp8 else 0
    byte = 1e9 / chip.copies / (1 if variant.floor else ELEMENTWISE)
    head_norms = 0.0 if variant.fused else (queries + keys) / workloads.SHAPES[size]["head_dim"] / NORM_BLOCKS
    attended = ideal if variant.floor else multiplied
    return {
        "products": product_nanoseconds(size, chip, fp8=fp8, floor=variant.floor),
        "attention": 1e9 * 4 * queries * attended / (ATTENTION[variant.page] * chip.sheet),
        "norms and rotation": 2 * norms * byte + 1e9 * head_norms,
        "activation": 2 * activation * byte,
        "copies": (2 * copies + quantising) * byte,
    }


def token_seconds(size: str, chip: Chip, variant: Variant, **options: Any) -> float:
    return (
        1e-9 * workloads.SHAPES[size]["num_hidden_layers"] * sum(nanoseconds(size, chip, variant, **options).values())
    )


def tokens_per_second(size: str, chip: Chip, variant: Variant, *, fp8: bool = False) -> Times:
    """Return unique tokens/s of batches on the device, also with the host's work before that of the device."""
    device = token_seconds(size, chip, variant, fp8=fp8)
    return {"device": 1 / device, "texts before": 1 / (device + TEXT + PLAN)}


def update_seconds(size: str, chip: Chip, *, fused: bool, rows: int, length: int) -> float:
    """Return the seconds of an update: the logits twice forward, and layers forward and backward."""
    layers, hidden, queries, keys, inner = sizes(size)
    forward = nanoseconds(size, chip, VARIANTS["path kernel" if fused else "pages of 128"], lengths=GRPO)
    # Numbers, forward and backward: norms 4 and 6 hidden, sums of gradients 15 hidden, norm and rotation of heads 2 and
    # 3, silu times up 3 and 5; the gradients of keys and values begin with zeros.
    numbers = 25 * hidden + 5 * (queries + keys) + 2 * keys + 8 * inner
    moved = 2 * numbers if fused else TRAINED_BYTES[size]
    layer = 3 * forward["products"] + (1 + ATTENTION_BACKWARD) * forward["attention"]
    layer += 1e9 * moved / (ELEMENTWISE * chip.copies)
    vocabulary = workloads.SHAPES[size]["vocab_size"]
    logits = 8 * hidden * vocabulary / chip.products + 8 * 4 * vocabulary / (ELEMENTWISE * chip.copies)
    return rows * length * logits + (rows * length + rows / 8 * GRPO[0]) * layers * 1e-9 * layer


def generation_seconds(size: str, chip: Chip, *, graphs: bool, rows: int, length: int) -> float:
    """Return the seconds to sample replies; without CUDA graphs the host launches every kernel."""
    layers, hidden, _, keys, _ = sizes(size)
    vocabulary = workloads.SHAPES[size]["vocab_size"]
    every = weights(size) + hidden * vocabulary
    read = 2 * every + rows * (GRPO[0] / 8 + length / 2) * layers * 2 * keys * 2
    step = read / (DECODE * chip.copies) + 2 * rows * every / chip.products
    step += SAMPLING_PASSES * 4 * rows * vocabulary / (ELEMENTWISE * chip.copies)
    return length * max(step, 0.0 if graphs else layers * DECODE_LAUNCHES * LAUNCH)


def grpo_seconds(size: str, chip: Chip, *, fused: bool, rows: int = 512, length: int = 512) -> Times:
    """Return the seconds of the phases of a GRPO step with a policy and a reward model of this size in bfloat16."""
    variant = VARIANTS["path kernel" if fused else "pages of 128"]
    phases = {
        "generate": generation_seconds(size, chip, graphs=fused, rows=rows, length=length),
        "score": (rows * length + rows / 8 * GRPO[0]) * token_seconds(size, chip, variant, lengths=GRPO),
        "update": update_seconds(size, chip, fused=fused, rows=rows, length=length),
    }
    return phases | {"step": sum(phases.values())}


def predictions() -> dict[str, Any]:
    """Return every prediction."""
    goals = {"0.6B": {"H100": 500e3, "H200": 550e3}, "8B": {"H100": 48e3, "H200": 49e3}}
    fp8_goals = {"8B": {"H100": 70e3, "H200": 75e3}}
    assumed = {
        "TFLOP per s of large products, H100": CHIPS["H100"].products / 1e12,
        "TFLOP per s of large products, H200": CHIPS["H200"].products / 1e12,
        "TB per s of a copy, H100": CHIPS["H100"].copies / 1e12,
        "TB per s of a copy, H200": CHIPS["H200"].copies / 1e12,
        "a product of K numbers a row reaches the share K : (K + this)": K_HALF,
        "products in fp8: of twice the rate": FP8,
        "elementwise kernels: of the rate of a copy": ELEMENTWISE,
        "attention, pages of 128: of 989 TFLOP per s": ATTENTION[128],
        "attention, pages of 64: of 989 TFLOP per s": ATTENTION[64],
        "attention along paths: of 989 TFLOP per s": ATTENTION[None],
        "blocks per us of torch's norm, which has one for each head of a token": NORM_BLOCKS / 1e6,
        "us of the host for the text of a token": 1e6 * TEXT,
        "threads of the tokenizer beside the device": THREADS,
        "us of the host for a launch in eager decoding": 1e6 * LAUNCH,
        "reading of weights, keys and values in decoding: of the rate of a copy": DECODE,
        "backward of attention, in forwards": ATTENTION_BACKWARD,
    }
    values: dict[str, Any] = {
        "assumed": {name: {"value": value} for name, value in assumed.items()},
        "scoring": {},
        "scoring in fp8": {},
        "nanoseconds": {},
        "tiles over ideal": {},
    }
    for size in SCORED:
        for kind, fp8, wanted in (("scoring", False, goals), ("scoring in fp8", True, fp8_goals)):
            values[kind][size] = {
                name: {"launches": variant.launches}
                | {chip: tokens_per_second(size, of, variant, fp8=fp8) for chip, of in CHIPS.items()}
                | {f"goal {chip}": goal for chip, goal in wanted.get(size, {}).items() if name == "path kernel"}
                for name, variant in VARIANTS.items()
            }
        if size != "4B":
            values["nanoseconds"][size] = {
                name: nanoseconds(size, CHIPS["H100"], each) for name, each in VARIANTS.items()
            }
    for what, lengths in (("GSM8K, 100 + 130 tokens", GSM8K), ("GRPO, 100 + 512 tokens", GRPO)):
        found = {
            name: keys_of(lengths, each.page, 2) for name, each in VARIANTS.items() if not each.fused or not each.page
        }
        values["tiles over ideal"][what] = {name: many / ideal for name, (ideal, many, _) in found.items()}
        values["tiles over ideal"][what] |= {"slots": found["pages of 128"][2], "keys": found["floor"][0], "floor": 1.0}
    values["GRPO step"] = {
        f"{name}, {TRAINED_LAUNCHES[name]} launches a layer of the update": {
            phase: {chip: grpo_seconds("0.6B", of, fused=name == "fused")[phase] for chip, of in CHIPS.items()}
            for phase in ("generate", "score", "update", "step")
        }
        | ({"goal": {"H100": 7.0, "H200": 6.0}} if name == "fused" else {})
        for name in TRAINED_LAUNCHES
    }
    values["generation"] = {
        f"{rows // 8} x 8 x 512": {
            name: {
                chip: rows * 512 / generation_seconds("0.6B", of, graphs=name == "graphs", rows=rows, length=512)
                for chip, of in CHIPS.items()
            }
            for name in ("eager", "graphs")
        }
        for rows in (512, 64)
    }
    vocabulary = workloads.SHAPES["8B"]["hidden_size"] * workloads.SHAPES["8B"]["vocab_size"]
    values["host"] = {"one thread": 1 / (TEXT + PLAN), "threads": 1 / (TEXT / THREADS + PLAN)}
    values["loading 8B"] = 2 * (weights("8B") + vocabulary) / LOAD_BYTES + LOAD_SECONDS
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results.add_argument(parser)
    args = parser.parse_args()
    values = predictions()
    for size, of in values["scoring"].items():
        for name, each in of.items():
            print(f"{size}, {name}:", *(f"{chip} {each[chip]['device']:,.0f} tokens/s;" for chip in CHIPS))
    results.save(args.save, values, kind="computed")


if __name__ == "__main__":
    main()
