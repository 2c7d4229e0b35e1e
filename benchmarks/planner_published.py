"""What the planner predicts beside throughput that others have published for the same models and GPUs.

    python benchmarks/planner_published.py [--servers FILE]

Training: NVIDIA NeMo AutoModel's performance summary (DGX H100, bfloat16; LoRA rows and pre-training rows, full
sequences, no padding). Its page does not say which runs compute activations again, so both predictions are shown.
Reinforcement learning: NVIDIA NeMo RL 0.4's performance summary (GRPO on OpenMathInstruct-2, on-policy, DGX H100). It
gives the mean length, not the distribution; the quantiles here have that mean and the published maximum.
Servers, with the file `systems/silicon_sample.csv` of the package `aiconfigurator_core`: SGLang, vLLM and TensorRT-LLM
as NVIDIA measured them on H100, weights not quantised. Time to the first token plus the time of the others, against the
planner's time for the same number of conversations.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results
from rich.console import Console
from rich.table import Table

from gym_rm.lora_settings import LoRASettings
from gym_rm.planning.hardware.devices import KINDS, device_of_kind
from gym_rm.planning.lengths import constant
from gym_rm.planning.model.config_sizes import shape_from_config
from gym_rm.planning.model.known_models import load_shape
from gym_rm.planning.plan import Phase, Role
from gym_rm.planning.plan_request import Choice, Component, StepWorkload
from gym_rm.planning.planner import plan
from gym_rm.planning.quantities import Basis, Quantity, assumed
from gym_rm.planning.step_times import Site, component_times

NETWORK = Quantity(50e9, Basis.TABLE, "NVIDIA AIConfigurator 0.12")


@dataclass(frozen=True)
class Training:
    """A published training run: tokens/s of each GPU."""

    model: str
    gpus: int
    length: int
    batch: int
    micro_batch: int
    tp: int
    fsdp: int
    lora: bool
    published: float


TRAINING = [
    Training("meta-llama/Llama-3.1-8B", 1, 4096, 32, 2, 1, 1, True, 12472.87),
    Training("Qwen/Qwen2.5-7B", 1, 4096, 32, 2, 1, 1, True, 14110.05),
    Training("Qwen/Qwen2.5-32B", 8, 4096, 32, 2, 2, 4, True, 2250.31),
    Training("Qwen/Qwen2.5-32B", 16, 4096, 32, 2, 2, 8, True, 2072.89),
    Training("meta-llama/Llama-3.1-70B", 8, 4096, 32, 2, 2, 4, True, 1091.85),
    Training("meta-llama/Llama-3.1-70B", 16, 4096, 32, 2, 2, 8, True, 984.85),
    Training("meta-llama/Llama-3.1-70B", 64, 8192, 128, 1, 1, 32, False, 866.77),
    Training("Qwen/Qwen3-30B-A3B", 8, 4096, 512, 4, 1, 8, False, 12040),
    Training("openai/gpt-oss-20b", 8, 4096, 256, 2, 1, 8, False, 13058),
    Training("openai/gpt-oss-120b", 64, 4096, 512, 2, 1, 64, False, 7626),
]


@dataclass(frozen=True)
class GRPO:
    """A published GRPO run: seconds of a step with 2,048 conversations and 4 updates."""

    model: str
    nodes: int
    generation_tp: int
    policy_tp: int
    mean: int
    replies: dict[str, float]
    published: float


STEPS = [
    GRPO("meta-llama/Llama-3.1-8B", 2, 1, 1, 1060, {"p50": 690, "p80": 1350, "p95": 2800, "max": 4000}, 97.7),
    GRPO("Qwen/Qwen3-32B", 4, 4, 4, 3206, {"p20": 2800, "p50": 3300, "p80": 3990, "max": 4000}, 393),
    GRPO("Qwen/Qwen3-30B-A3B", 4, 4, 2, 3154, {"p20": 2700, "p50": 3250, "p80": 3980, "max": 4000}, 225),
]


def predicted_tokens(run: Training, *, checkpointing: bool) -> float:
    """Return the tokens/s of each GPU."""
    shape = load_shape(run.model, None, num_labels=None, name=run.model)
    component = Component(
        "policy", Role.POLICY, shape, "bfloat16", "training", lora=LoRASettings() if run.lora else None
    )
    choice = Choice(
        tensor_parallel_size=run.tp,
        fsdp_size=run.fsdp,
        num_replicas=run.gpus // (run.tp * run.fsdp),
        max_num_batched_tokens=run.micro_batch * run.length,
        gradient_checkpointing=checkpointing,
    )
    work = StepWorkload(run.batch, 1, 1, 0, constant(1), constant(run.length - 1))
    site = Site(KINDS["h100_sxm"], NETWORK, run.gpus, min(run.gpus, 8))
    seconds = component_times(component, choice, work, site, old_log_probs=False)[Phase.UPDATE].total
    return run.batch * run.length / seconds / run.gpus


def _config(model_type: str, vocabulary: int, hidden: int, layers: int, inner: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": model_type, "vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers,
        "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip


SERVED = {
    "Qwen/Qwen3-32B": _config("qwen3", 151_936, 5120, 64, 25_600, 64),
    "meta-llama/Llama-3.1-8B-Instruct": _config("llama", 128_256, 4096, 32, 14_336, 32),
}


def generation(model: str, row: Any) -> tuple[float, float]:
    """Return our seconds, and the share of the GPUs' memory that weights and cache need."""
    shape, device = shape_from_config(SERVED[model], name=model), device_of_kind(row.system)
    batch, size = int(row.batch_size), int(row.tp_size)
    component = Component("model", Role.GENERATION, shape, "bfloat16", "vllm")
    workload = StepWorkload(batch, 1, 1, 0, constant(row.isl), constant(row.osl))
    choice = Choice(tensor_parallel_size=size, max_num_batched_tokens=8192, max_num_seqs=batch)
    site = Site(device, assumed(50e9, "one node"), 8, 8)
    clock = component_times(component, choice, workload, site)[Phase.GENERATE]
    needed = 2.0 * (shape.parameters + batch * shape.cached_numbers(row.isl + row.osl))
    return clock.total, needed / size / device.memory.value


def servers(console: Console, samples: Path) -> dict[str, Any]:
    import pandas

    data = pandas.read_csv(samples)
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
    by_server = {
        f"{model.rpartition('/')[2]}, {server}, TP {size}": {
            "runs": len(values),
            "min": min(values),
            "median": statistics.median(values),
            "max": max(values),
        }
        for (model, server, size), values in sorted(ratios.items())
    }
    return {"runs": len(everything), "within 20 %": within, "by server": by_server}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=Path, help="silicon_sample.csv of aiconfigurator_core")
    results.add_argument(parser)
    args = parser.parse_args()
    console = Console(width=150)
    console.print("Arithmetic only: the hardware of this machine does not matter.")
    values = {"training": training(console), "GRPO": steps(console)}
    if args.servers is not None:
        values["servers"] = servers(console, args.servers)
    results.save(args.save, values, kind="computed")


def training(console: Console) -> dict[str, Any]:
    values: dict[str, Any] = {}
    table = Table("model", "GPUs", "TP x FSDP", "published", "ours", "ratio", "ours, activations again", "ratio")
    ratios = []
    for run in TRAINING:
        kept, again = (predicted_tokens(run, checkpointing=value) for value in (False, True))
        ratios.append(again / run.published)
        cells = (f"{run.gpus}", f"{run.tp} x {run.fsdp}", f"{run.published:,.0f}", f"{kept:,.0f}")
        table.add_row(run.model + (" LoRA" if run.lora else ""), *cells, f"{kept / run.published:.2f}", f"{again:,.0f}",
                      f"{again / run.published:.2f}")  # fmt: skip
        name = run.model.rpartition("/")[2] + (", LoRA" if run.lora else "")
        values[f"{name}, {run.gpus} GPUs, {run.tp} x {run.fsdp}"] = {
            "GPUs": run.gpus,
            "published": run.published,
            "ours": again,
            "ratio": again / run.published,
            "ratio with kept activations": kept / run.published,
        }
    table.title = "training, tokens/s of each H100 (NeMo AutoModel)"
    console.print(table)
    console.print(f"median ratio with activations computed again: {statistics.median(ratios):.2f}")
    return values


def steps(console: Console) -> dict[str, Any]:
    values: dict[str, Any] = {}
    table = Table("model", "GPUs", "mean tokens", "published s", "ours s", "ratio", "our phases, s")
    for run in STEPS:
        found = plan(
            {
                "cluster": {"gpu": "h100_sxm", "nodes": run.nodes, "gpus_per_node": 8},
                "policy": {"model": run.model, "tensor_parallel_size": run.policy_tp, "gradient_checkpointing": True},
                "generation": {"tensor_parallel_size": run.generation_tp},
                "reference": True,
                "pools": "together",
                "workload": {
                    "num_prompts": 64,
                    "group_size": 32,
                    "updates_per_step": 4,
                    "prompt_tokens": {"p50": 90, "max": 200},
                    "reply_tokens": run.replies,
                },
            }
        )
        phases = ", ".join(f"{phase.value} {seconds:.0f}" for phase, seconds in found.phase_seconds)
        mean = f"{found.tokens / found.conversations:,.0f} / {run.mean:,}"
        table.add_row(run.model, f"{8 * run.nodes}", mean, f"{run.published:.0f}", f"{found.step_seconds:.0f}",
                      f"{found.step_seconds / run.published:.2f}", phases)  # fmt: skip
        values[run.model.rpartition("/")[2]] = {
            "GPUs": 8 * run.nodes,
            "published": run.published,
            "ours": found.step_seconds,
            "ratio": found.step_seconds / run.published,
        }
    table.title = "one GRPO step of 2,048 conversations on H100 (NeMo RL 0.4, on-policy)"
    console.print(table)
    return values


if __name__ == "__main__":
    main()
