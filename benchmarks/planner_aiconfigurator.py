"""Show the planner's times beside those of NVIDIA AIConfigurator, and beside its measured tables.

    python benchmarks/planner.py aiconfigurator [--tables FOLDER]

First table: 16 sequences of 1,024 tokens, prefill only, in bfloat16: what a reward model computes. Their numbers are
what AIConfigurator 0.12 printed for vLLM (`estimate --estimate-mode static_ctx`). With `--tables`, the folder of the
package `aiconfigurator_core`, the second table compares the products and the attention of one layer with the kernels
that were measured there (vLLM 0.24.0, bfloat16).
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gym_rm.planning.hardware import Device, device_of_kind
from gym_rm.planning.lengths import constant
from gym_rm.planning.models import ModelShape, shape_from_config
from gym_rm.planning.plan import Phase, Role, TimePart
from gym_rm.planning.quantities import assumed
from gym_rm.planning.request import Choice, Component, Workload
from gym_rm.planning.times import ATTENTION, MATMUL, Site, component_times


def _config(model_type: str, vocabulary: int, hidden: int, layers: int, inner: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": model_type, "vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers,
        "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip


MODELS = {
    "Qwen3-0.6B": _config("qwen3", 151_936, 1024, 28, 3072, 16),
    "Qwen3-8B": _config("qwen3", 151_936, 4096, 36, 12_288, 32),
    "Llama-3.1-8B": _config("llama", 128_256, 4096, 32, 14_336, 32),
    "Llama-3.1-70B": _config("llama", 128_256, 8192, 80, 28_672, 64),
}
# model, GPU, tensor_parallel_size, milliseconds that AIConfigurator 0.12 predicts
PUBLISHED = [
    ("Qwen3-0.6B", "h200_sxm", 1, 33.6),
    ("Qwen3-8B", "h200_sxm", 1, 349.0),
    ("Qwen3-8B", "h100_sxm", 1, 345.0),
    ("Llama-3.1-8B", "h200_sxm", 1, 348.0),
    ("Llama-3.1-8B", "h100_sxm", 1, 348.0),
    ("Llama-3.1-8B", "a100_sxm", 1, 951.0),
    ("Llama-3.1-70B", "h200_sxm", 2, 1856.0),
    ("Llama-3.1-70B", "h200_sxm", 4, 1092.0),
    ("Llama-3.1-70B", "h200_sxm", 8, 648.0),
    ("Llama-3.1-70B", "h100_sxm", 4, 1016.0),
    ("Llama-3.1-70B", "h100_sxm", 8, 632.0),
]
SEQUENCES, LENGTH = 16, 1024


def shape_of(model: str) -> ModelShape:
    return shape_from_config(MODELS[model], name=model, num_labels=1)


def prefill(model: str, device: Device, tensor_parallel_size: int, length: int, sequences: int) -> tuple[TimePart, ...]:
    component = Component("model", Role.REWARD_MODEL, shape_of(model), "bfloat16", "gym_rm")
    workload = Workload(sequences, 1, 1, 0, constant(length - 1), constant(1))
    choice = Choice(tensor_parallel_size=tensor_parallel_size, max_num_batched_tokens=length * sequences)
    return component_times(component, choice, workload, Site(device, assumed(50e9, "one node"), False))[
        Phase.SCORE
    ].parts()


def published(console: Console) -> None:
    table = Table(title=f"prefill of {SEQUENCES} x {LENGTH} tokens", title_justify="left")
    for title in (
        "model",
        "GPU",
        "TP",
        "AIConfigurator ms",
        "ours ms",
        "ours / theirs",
        "of the peak",
        "our parts, ms",
    ):
        table.add_column(title, justify="left" if title in ("model", "GPU", "our parts, ms") else "right")
    for model, gpu, size, theirs in PUBLISHED:
        device = device_of_kind(gpu)
        parts = prefill(model, device, size, LENGTH, SEQUENCES)
        ours = 1000 * sum(part.seconds for part in parts)
        flops = 2.0 * shape_of(model).active_parameters * SEQUENCES * LENGTH / size / device.flops.value
        text = ", ".join(f"{part.name} {1000 * part.seconds:.0f}" for part in parts)
        shares = f"{100_000 * flops / theirs:.0f}% / {100_000 * flops / ours:.0f}%"
        table.add_row(model, gpu, str(size), f"{theirs:g}", f"{ours:.1f}", f"{ours / theirs:.2f}", shares, text)
    console.print(table)
    console.print("of the peak: products of the weights alone over the published FLOP/s, theirs / ours.")


# --- their measured kernels ------------------------------------------------------------------------------------------


def nearest_time(rows: Any, sizes: dict[str, float]) -> float | None:
    """Return the milliseconds of the kernel whose sizes are nearest in proportion, scaled by the work.

    None if a size differs by more than a factor of 2.
    """
    import numpy as np

    distance = np.zeros(len(rows))
    for name, value in sizes.items():
        distance = np.maximum(distance, np.abs(np.log(rows[name].to_numpy(dtype=float) / value)))
    if not len(rows) or distance.min() > math.log(2.0):
        return None
    best = rows.iloc[int(distance.argmin())]
    return float(best["latency"]) * math.prod(value / float(best[name]) for name, value in sizes.items())


def kernels(console: Console, folder: Path) -> None:
    import pandas

    table = Table(title="products and attention of one layer, without tensor parallelism", title_justify="left")
    for title in (
        "GPU",
        "model",
        "texts",
        "products: theirs ms",
        "ours",
        "ratio",
        "attention: theirs ms",
        "ours",
        "ratio",
    ):
        table.add_column(title, justify="left" if title in ("GPU", "model", "texts") else "right")
    for gpu in ("h100_sxm", "h200_sxm"):
        data = folder / "systems" / "data" / gpu
        gemm = pandas.read_parquet(data / "gemm" / "vllm" / "0.24.0" / "gemm_perf.parquet")
        gemm = gemm[gemm["gemm_dtype"] == "bfloat16"]
        attention = pandas.read_parquet(data / "attention" / "vllm" / "0.24.0" / "context_attention_perf.parquet")
        attention = attention[(attention["attn_dtype"] == "bfloat16") & (attention["kv_cache_dtype"] == "bfloat16")]
        attention = attention[(attention["window_size"] == 0) & (attention["step"] == 0)]
        for model in MODELS:
            for sequences, length in ((4, 1024), (16, 1024), (4, 4096)):
                row = layer_row(gemm, attention, model, device_of_kind(gpu), sequences, length)
                table.add_row(gpu, model, f"{sequences} x {length}", *row)
    console.print(table)


def layer_row(gemm: Any, attention: Any, model: str, device: Device, sequences: int, length: int) -> list[str]:
    config, shape = MODELS[model], shape_of(model)
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    tokens = sequences * length
    products = [(hidden, (heads + 16) * 128), (heads * 128, hidden), (hidden, 2 * inner), (inner, hidden)]
    times = [nearest_time(gemm, {"m": tokens, "k": k, "n": n}) for k, n in products]
    theirs = None if None in times else sum(time for time in times if time is not None)
    rows = attention[(attention["head_dim"] == 128) & (attention["num_key_value_heads"].isin([8, 0]))]
    rows = rows[(rows["num_heads"] == heads) & (rows["isl"] == length)]
    attended = nearest_time(rows, {"batch_size": sequences})
    parts = {part.name: part.seconds for part in prefill(model, device, 1, length, sequences)}
    ours = [1000 * parts.get(name, 0.0) / shape.num_layers for name in (MATMUL, ATTENTION)]
    cells: list[str] = []
    for measured, value in zip((theirs, attended), ours, strict=True):
        known = measured is not None
        cells += [f"{measured:.3f}" if known else "-", f"{value:.3f}", f"{value / measured:.2f}" if known else "-"]
    return cells


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, help="folder of the unpacked package aiconfigurator_core")
    args = parser.parse_args(arguments)
    console = Console(width=170)
    console.print(" ".join(sys.argv))
    published(console)
    if args.tables is not None:
        kernels(console, args.tables)


if __name__ == "__main__":
    main()
