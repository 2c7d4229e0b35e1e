"""Show the planner's times beside those of NVIDIA AIConfigurator, and beside its measured tables.

    python benchmarks/planner.py aiconfigurator [--tables FOLDER]

First table: 16 sequences of 1,024 tokens, prefill only, in bfloat16: what a reward model computes. Their numbers are
what AIConfigurator 0.12 printed for vLLM (`estimate --estimate-mode static_ctx`). With `--tables`, the folder of the
package `aiconfigurator_core`, the second table compares the products and the attention of one layer with the kernels
that were measured there (vLLM 0.24.0, bfloat16), and the third one compares generation with servers that were measured
(`systems/silicon_sample.csv`: SGLang, vLLM and TensorRT-LLM on H100, weights not quantised): time to the first token
plus the time of the others, against the planner's time for the same number of conversations.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gym_rm.planning.hardware.devices import Device, device_of_kind
from gym_rm.planning.model.loading import ModelShape, shape_from_config
from gym_rm.planning.plan import Phase, Role, TimePart
from gym_rm.planning.quantities import assumed
from gym_rm.planning.request import Choice, Component, Workload
from gym_rm.planning.times import ATTENTION, MATMUL, Site, component_times
from gym_rm.planning.workload.lengths import constant


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


# --- their measured servers ------------------------------------------------------------------------------------------

SERVED = {
    "Qwen/Qwen3-32B": _config("qwen3", 151_936, 5120, 64, 25_600, 64),
    "meta-llama/Llama-3.1-8B-Instruct": MODELS["Llama-3.1-8B"],
}


def generation(model: str, row: Any) -> tuple[float, float]:
    """Return our seconds, and the share of the GPUs' memory that weights and cache need."""
    shape, device = shape_from_config(SERVED[model], name=model), device_of_kind(row.system)
    batch, size = int(row.batch_size), int(row.tp_size)
    component = Component("model", Role.GENERATION, shape, "bfloat16", "vllm")
    workload = Workload(batch, 1, 1, 0, constant(row.isl), constant(row.osl))
    choice = Choice(tensor_parallel_size=size, max_num_batched_tokens=8192, max_num_seqs=batch)
    site = Site(device, assumed(50e9, "one node"), False)
    clock = component_times(component, choice, workload, site)[Phase.GENERATE]
    needed = 2.0 * (shape.parameters + batch * shape.cached_numbers(row.isl + row.osl))
    return clock.total, needed / size / device.memory.value


def servers(console: Console, folder: Path) -> None:
    import pandas

    data = pandas.read_csv(folder / "systems" / "silicon_sample.csv")
    chosen = data["model_path"].isin(SERVED) & (data["system"] == "h100_sxm")
    data = data[chosen & data["gemm_quant_mode"].isna() & data["precision"].isna()]
    ratios: dict[tuple[str, str, int], list[float]] = {}
    waiting = 0
    for row in data.itertuples():
        ours, share = generation(row.model_path, row)
        if share > 0.85:  # conversations wait for a place in the cache, or in part do not fit
            waiting += 1
            continue
        theirs = (row.silicon_ttft_ms + (row.osl - 1) * row.silicon_tpot_ms) / 1000
        ratios.setdefault((row.model_path, row.backend, int(row.tp_size)), []).append(ours / theirs)
    table = Table("model", "server", "TP", "runs", "min", "median", "max", title="ours / measured servers, generation")
    everything = [ratio for values in ratios.values() for ratio in values]
    for (model, server, size), values in [*sorted(ratios.items()), (("all", "", 0), everything)]:
        numbers = (f"{value:.2f}" for value in (min(values), statistics.median(values), max(values)))
        table.add_row(model, server, str(size or ""), str(len(values)), *numbers)
    console.print(table)
    within = sum(0.8 <= ratio <= 1.2 for ratio in everything) / len(everything)
    console.print(f"{within:.0%} of the runs are within 20%; {waiting} runs were left out: memory does not hold them")


def add_parser(commands: Any) -> None:
    """Add the command `aiconfigurator`."""
    form = argparse.RawDescriptionHelpFormatter
    text = "beside AIConfigurator and its measured tables"
    parser = commands.add_parser("aiconfigurator", help=text, description=__doc__, formatter_class=form)
    parser.add_argument("--tables", type=Path, help="folder of the unpacked package aiconfigurator_core")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    console = Console(width=170)
    console.print(" ".join(sys.argv))
    published(console)
    if args.tables is not None:
        kernels(console, args.tables)
        servers(console, args.tables)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["aiconfigurator", *arguments])
    args.run(args)


if __name__ == "__main__":
    main(sys.argv[1:])
