"""How a job grows from 8 to 10,000 GPUs, and what failures cost: plans whose steps are simulated.

python benchmarks/simulation.py [--seeds 1] [--picture docs/images/simulation.png]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import results
from rich.console import Console
from rich.table import Table

from gym_rm.planning.plan import Plan
from gym_rm.planning.planner import plan
from gym_rm.planning.simulation import LLAMA_3_HOURS, SimulationSettings, simulate

NODES = (1, 8, 64, 256, 1250)
RATES = (0, 1, 10)  # times as many failures as in the training of Llama 3
NUM_STEPS = 250
NAMES = {False: "synchronous", True: "asynchronous"}
LABELS = {0: "no failures", 1: "failures as in Llama 3", 10: "10 times as many"}
Rows = dict[tuple[bool, int, int], tuple[float, float]]  # conversations/s and share lost, by mode, rate and nodes


def planned(nodes: int, asynchronous: bool) -> Plan:
    """Return the plan of a job with 32 conversations for each GPU, with the long replies of a reasoning model."""
    return plan(
        {
            "cluster": {"gpu": "h100_sxm", "nodes": nodes, "gpus_per_node": 8},
            "policy": {"model": "Qwen/Qwen3-8B"},
            "reward_models": {"quality": {"model": "Skywork/Skywork-Reward-V2-Llama-3.1-8B"}},
            "pools": [["policy"], ["generation"], ["quality"]] if asynchronous else "together",
            "workload": {
                "num_prompts": 32 * nodes,
                "group_size": 8,
                "prompt_tokens": 512,
                "reply_tokens": {"p50": 3000, "p95": 16_000, "max": 32_768},
                "asynchronous": asynchronous,
            },
        }
    )


def settings_of(found: Plan, times: int, num_steps: int, seed: int) -> SimulationSettings:
    return SimulationSettings(
        num_steps=num_steps,
        gpu_hours=LLAMA_3_HOURS / times if times else None,
        load_seconds=max(120.0, found.load_seconds),
        slow_share=0.01,
        seed=seed,
    )


def measure(seeds: int, console: Console) -> tuple[Rows, dict[str, Any]]:
    """Simulate all cases, print a row for each, and return the rows of the picture and all numbers."""
    table = Table(
        "GPUs", "steps", "failures a day", "conversations/s", "idle", "lost", "p50 step", "p95", "simulated in"
    )
    rows: Rows = {}
    values: dict[str, Any] = {}
    for asynchronous, name in NAMES.items():
        for nodes in NODES:
            found = planned(nodes, asynchronous)
            usual = 0.0
            for times in RATES:
                started = time.perf_counter()
                results_of = [simulate(found, settings_of(found, times, NUM_STEPS, seed)) for seed in range(seeds)]
                elapsed = (time.perf_counter() - started) / seeds
                seconds = sum(result.seconds for result in results_of)
                usual = usual or seconds  # without failures, of the same seeds
                rate = sum(result.conversations for result in results_of) / seconds
                lost = 1 - usual / seconds
                rows[asynchronous, times, nodes] = rate, lost
                failures = found.used_gpus * 24 / LLAMA_3_HOURS * times
                idle = statistics.mean(result.idle_share for result in results_of)
                median, late = (
                    statistics.mean(result.step_quantile(share) for result in results_of) for share in (0.5, 0.95)
                )
                values.setdefault(name, {})[f"{found.num_gpus:,}, {LABELS[times]}"] = {
                    "GPUs": found.num_gpus,
                    "failures a day": failures,
                    "conversations per second": rate,
                    "idle": idle,
                    "usual step": median,
                    "95 %": late,
                } | ({"lost": lost} if times else {})
                table.add_row(
                    f"{found.num_gpus:,} {name}",
                    f"{seeds * NUM_STEPS:,}",
                    f"{failures:.2f}",
                    f"{rate:,.1f}",
                    f"{idle:.0%}",
                    f"{lost:.1%}",
                    f"{median:.0f} s",
                    f"{late:.0f} s",
                    f"{elapsed:.1f} s",
                )
    console.print(table)
    return rows, values


def draw(rows: Rows, path: Path) -> None:
    """Draw throughput and what failures cost."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = [8 * nodes for nodes in NODES]
    for asynchronous, colour in {False: "#1f6f8b", True: "#c8553d"}.items():
        for times, style in {0: ":", 1: "-", 10: "--"}.items():
            rates, lost = zip(*(rows[asynchronous, times, nodes] for nodes in NODES), strict=True)
            look = {"color": colour, "marker": "o", "markersize": 3, "label": f"{NAMES[asynchronous]}, {LABELS[times]}"}
            left.plot(sizes, [3600 * rate / gpus for rate, gpus in zip(rates, sizes, strict=True)], style, **look)
            if times:
                right.plot(sizes, [100 * share for share in lost], style, **look)
    left.set(title="Throughput", ylabel="conversations per GPU and hour", ylim=(0, None))
    right.set(title="Cost of failures", ylabel="throughput lost, %")
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_xticks(sizes, [f"{gpus:,}" for gpus in sizes])
        axis.minorticks_off()
        axis.set_xlabel("GPUs")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each case")
    parser.add_argument("--picture", type=Path, default=Path("docs/images/simulation.png"))
    results.add_argument(parser)
    args = parser.parse_args()
    console = Console(width=140)
    console.print(f"python {' '.join(sys.argv)}")
    rows, values = measure(args.seeds, console)
    draw(rows, args.picture)
    results.save(args.save, values, kind="computed")


if __name__ == "__main__":
    main()
