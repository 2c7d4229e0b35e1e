"""Compare the planner's times with measured ones on this machine, after calibration.

    python benchmarks/planner.py throughput [--threads 1] [--only scoring|training|generation] [--repeats 4]

Scoring: `gym_rm.load_scorer` on real rows of ../shared/data, with templates and tokenisation. Training: forward,
backward and AdamW step of transformers on pairs. Generation: `generate` of transformers, sampling, with replies of
equal lengths. The models have random weights. The device is calibrated first, in the same process. With
one thread, the processor's time counts, so that other work on the machine disturbs less; with more, the time on the
clock. Short probes beside each run show how much slower the machine is at that time than in the calibration: `at
equal speed` is the ratio with the parts of the estimate at that speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
import workloads
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3Config

import gym_rm
from gym_rm.planning.hardware.calibrate import calibrate, calibration_rows, stored_device
from gym_rm.planning.hardware.devices import Device
from gym_rm.planning.model.loading import ModelShape, shape_from_config
from gym_rm.planning.plan import Phase, Role, TimePart
from gym_rm.planning.quantities import Basis, assumed
from gym_rm.planning.request import Choice, Component, Workload
from gym_rm.planning.times import BANDWIDTH, LAUNCH, MATMUL, SAMPLE, TEXT, Site, component_times
from gym_rm.planning.workload.lengths import Lengths, constant

SHAPES: dict[str, dict[str, int]] = {
    "5M": {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 64},
    "25M": workloads.SHAPES["25M"],
    "85M": workloads.SHAPES["100M"],
    "440M": {key: value for key, value in workloads.SHAPES["0.6B"].items() if key != "vocab_size"},
}
# name of the shape, rows, groups, size of a group, max_num_batched_tokens
SCORING = [
    ("5M", "gsm8k", 8, 8, 4096), ("5M", "gsm8k", 8, 8, 512), ("5M", "hh", 16, 4, 4096), ("5M", "gsm8k", 32, 1, 1024),
    ("25M", "gsm8k", 4, 8, 4096), ("25M", "gsm8k", 2, 8, 512), ("25M", "hh", 6, 8, 4096), ("25M", "gsm8k", 12, 1, 8192),
    ("85M", "gsm8k", 1, 8, 4096), ("85M", "hh", 4, 4, 1024), ("85M", "gsm8k", 4, 1, 2048),
    ("440M", "gsm8k", 1, 2, 2048), ("440M", "hh", 1, 2, 1024), ("440M", "gsm8k", 1, 1, 512),
]  # fmt: skip
# name of the shape, rows of a batch, tokens of a row
TRAINING = [
    ("5M", 16, 64), ("5M", 16, 256), ("5M", 4, 1024), ("5M", 2, 2048),
    ("25M", 16, 64), ("25M", 8, 128), ("25M", 2, 512), ("25M", 2, 1024),
    ("85M", 4, 64), ("85M", 4, 128), ("85M", 2, 512),
    ("440M", 2, 32), ("440M", 2, 64),
]  # fmt: skip
# name of the shape, conversations, tokens of the prompt, tokens of the reply
GENERATION = [
    ("5M", 1, 64, 64), ("5M", 8, 128, 128), ("5M", 32, 64, 64), ("5M", 8, 512, 64),
    ("25M", 1, 64, 64), ("25M", 8, 128, 32), ("25M", 32, 64, 32), ("25M", 2, 1024, 32),
    ("85M", 1, 64, 32), ("85M", 8, 64, 24), ("85M", 32, 32, 16),
    ("440M", 1, 32, 6), ("440M", 4, 32, 6), ("440M", 8, 16, 4),
]  # fmt: skip
LONG = 1.0  # seconds of a run, above which it is not repeated so often


@dataclasses.dataclass
class Case:
    """A configuration: its name, the parts of the estimate, and a function that loads it and returns the work."""

    name: str
    parts: tuple[TimePart, ...]
    load: Callable[[], Callable[[], object]]

    @property
    def estimate(self) -> float:
        return sum(part.seconds for part in self.parts)


def seconds(run: Callable[[], object]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    run()
    return clock() - started


def config(size: str, vocab_size: int, **settings: Any) -> Qwen3Config:
    tokens = {"pad_token_id": 2, "eos_token_id": 1, "max_position_embeddings": 32_768}
    return Qwen3Config(vocab_size=vocab_size, **tokens, **SHAPES[size], **settings)


def shape_of(settings: Qwen3Config, *, num_labels: int | None = None) -> ModelShape:
    return shape_from_config(settings.to_dict(), name="model", num_labels=num_labels)


def estimate(
    role: Role, shape: ModelShape, engine: str, workload: Workload, device: Device, phase: Phase, **choice: Any
) -> tuple[TimePart, ...]:
    component = Component("model", role, shape, "float32", engine, master_weights=False)
    site = Site(device, assumed(1e9, "one node"), spans=False)
    return component_times(component, Choice(**choice), workload, site)[phase].parts()


def measured_lengths(values: list[int]) -> Lengths:
    return Lengths(tuple(float(value) for value in sorted(values)), Basis.MEASURED, "rows")


# --- scoring ---------------------------------------------------------------------------------------------------------


def scoring(device: Device, tokenizer: Any) -> Iterator[Case]:
    for size, rows, groups, group_size, budget in SCORING:
        make = workloads.hh_groups if rows == "hh" else workloads.gsm8k_groups
        conversations = make(groups, group_size)
        whole = [len(ids) for ids in tokens_of(tokenizer, conversations)]
        prompts = [len(ids) for ids in tokens_of(tokenizer, [one[:-1] for one in conversations[::group_size]])]
        replies = [total - prompts[i // group_size] for i, total in enumerate(whole)]
        workload = Workload(groups, group_size, 1, 0, measured_lengths(prompts), measured_lengths(replies))
        settings = config(size, len(tokenizer), num_labels=1)

        def load(
            settings: Qwen3Config = settings, budget: int = budget, conversations: list[Any] = conversations
        ) -> Callable[[], object]:
            model = AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32)
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                scorer = gym_rm.load_scorer(folder, max_num_batched_tokens=budget, device="cpu")
            return lambda: scorer.score(conversations)

        shape = shape_of(settings, num_labels=1)
        parts = estimate(
            Role.REWARD_MODEL, shape, "gym_rm", workload, device, Phase.SCORE, max_num_batched_tokens=budget
        )
        name = f"{size}, {rows}, {groups} x {group_size}, {workload.unique_tokens:.0f} unique tokens, budget {budget}"
        yield Case(name, parts, load)


def tokens_of(tokenizer: Any, conversations: list[Any]) -> list[list[int]]:
    texts = tokenizer.apply_chat_template(conversations, tokenize=False)
    return tokenizer(texts)["input_ids"]


def real_tokens(tokenizer: Any, rows: int, length: int) -> torch.Tensor:
    ids = [token for row in tokens_of(tokenizer, workloads.gsm8k_singles(200)) for token in row]
    return torch.tensor((ids * (rows * length // len(ids) + 1))[: rows * length]).view(rows, length)


# --- training --------------------------------------------------------------------------------------------------------


def training(device: Device, tokenizer: Any) -> Iterator[Case]:
    for size, batch, length in TRAINING:
        settings = config(size, len(tokenizer), num_labels=1)

        def load(settings: Qwen3Config = settings, batch: int = batch, length: int = length) -> Callable[[], object]:
            model = AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32).train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
            tokens = real_tokens(tokenizer, batch, length)

            def step() -> None:
                optimizer.zero_grad()
                rewards = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[:, 0]
                (-torch.nn.functional.logsigmoid(rewards[::2] - rewards[1::2]).mean()).backward()
                optimizer.step()

            return step

        workload = Workload(batch // 2, 2, 1, 0, constant(length - 1), constant(1))
        parts = estimate(
            Role.REWARD_TRAINING, shape_of(settings, num_labels=1), "training", workload, device, Phase.UPDATE,
            max_num_batched_tokens=batch * length,
        )  # fmt: skip
        yield Case(f"{size}, {batch} x {length} tokens", parts, load)


# --- generation ------------------------------------------------------------------------------------------------------


def generation(device: Device, tokenizer: Any) -> Iterator[Case]:
    for size, batch, prompt, reply in GENERATION:
        settings = config(size, len(tokenizer), tie_word_embeddings=True)

        def load(
            settings: Qwen3Config = settings, batch: int = batch, prompt: int = prompt, reply: int = reply
        ) -> Callable[[], object]:
            model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
            model.generation_config.eos_token_id = None  # every reply has the same length
            tokens = real_tokens(tokenizer, batch, prompt)
            options = {"attention_mask": torch.ones_like(tokens), "do_sample": True, "top_k": 0}
            return lambda: model.generate(tokens, max_new_tokens=reply, **options)

        workload = Workload(batch, 1, 1, 0, constant(prompt), constant(reply))
        parts = estimate(
            Role.GENERATION, shape_of(settings), "transformers", workload, device, Phase.GENERATE,
            max_num_batched_tokens=batch * prompt, max_num_seqs=batch,
        )  # fmt: skip
        yield Case(f"{size}, {batch} x ({prompt} + {reply}) tokens", parts, load)


# --- report ----------------------------------------------------------------------------------------------------------

SORTS: dict[str, Callable[[Device, Any], Iterator[Case]]] = {
    "scoring": scoring,
    "training": training,
    "generation": generation,
}


class Probe:
    """How much longer work takes now than in the calibration, by sort of work: other programs slow it down."""

    def __init__(self, device: Device) -> None:
        self.matrix = torch.randn(1024, 1024)
        self.rows, self.weights = torch.randn(8, 1024), torch.randn(3072, 1024).repeat(10, 1, 1)
        self.small, self.wide = torch.ones(16), torch.ones(2**20)
        expected = device.flops_float32.value * device.matmul_share(8).value
        self.expected = {
            "large": 2.0 * 1024**3 / device.flops_float32.value,
            "few": 10 * 2.0 * 8 * 1024 * 3072 / expected,
            BANDWIDTH: 8.0 * 2**22 / device.elementwise_bandwidth(2**22).value,
            LAUNCH: 200 * device.launch.value,
        }

    def __call__(self) -> dict[str, float]:
        runs: dict[str, Callable[[], object]] = {
            "large": lambda: torch.nn.functional.linear(self.matrix, self.matrix),
            "few": lambda: [torch.nn.functional.linear(self.rows, each) for each in self.weights],
            BANDWIDTH: lambda: torch.nn.functional.silu(self.wide * self.wide + self.wide),
            LAUNCH: lambda: [self.small.mul(1.0) for _ in range(200)],
        }
        found = {}
        with torch.inference_mode():
            for name, run in runs.items():
                run()
                found[name] = statistics.median(seconds(run) for _ in range(5)) / self.expected[name]
        return found


def slowed(part: TimePart, slowdown: dict[str, float], sort: str) -> float:
    """Return the seconds of a part at the speed that the machine had."""
    if part.name == MATMUL and sort == "generation":
        return part.seconds * slowdown["few"]
    return part.seconds * slowdown.get(LAUNCH if part.name in (SAMPLE, TEXT) else part.name, slowdown["large"])


def measure(case: Case, probe: Probe, repeats: int) -> tuple[list[float], dict[str, float]]:
    """Return the seconds of repeated runs, and how much slower the machine was around them."""
    torch.manual_seed(0)
    work = case.load()
    first = seconds(work)
    times, probes = [], [probe()]
    for _ in range(repeats if first < LONG else max(1, repeats // 2)):
        times.append(seconds(work))
        probes.append(probe())
    return times, {name: statistics.median(each[name] for each in probes) for name in probes[0]}


def compare(
    console: Console, sort: str, device: Device, tokenizer: Any, repeats: int, kept: dict[str, Any], path: Path | None
) -> tuple[list[float], list[float]]:
    """Print and return the ratios of estimates to measured times: as they are, and at the speed of the moment."""
    table = Table(title=f"{sort}: estimate / measured", title_justify="left")
    for title in ("configuration", "measured s", "slower", "estimate s", "ratio", "at equal speed", "parts"):
        table.add_column(title, justify="left" if title in ("configuration", "parts") else "right")
    probe = Probe(device)
    raw, equal = [], []
    for case in SORTS[sort](device, tokenizer):
        key = f"{sort}: {case.name}"
        if key not in kept:
            kept[key] = measure(case, probe, repeats)
            gc.collect()
            if path is not None:
                path.write_text(json.dumps(kept, indent=1))
        times, slowdown = kept[key]
        middle = statistics.median(times)
        now = sum(slowed(part, slowdown, sort) for part in case.parts)
        raw.append(case.estimate / middle)
        equal.append(now / middle)
        parts = ", ".join(f"{part.name} {100 * part.seconds / case.estimate:.0f}%" for part in case.parts)
        slower = "/".join(f"{value:.2f}" for value in slowdown.values())
        table.add_row(
            case.name, f"{middle:.3f}", slower, f"{case.estimate:.3f}", f"{raw[-1]:.2f}", f"{equal[-1]:.2f}", parts
        )
        if os.environ.get("LIVE"):
            print(case.name, f"{middle:.3f}", slower, f"{raw[-1]:.2f}", f"{equal[-1]:.2f}", parts, flush=True)
    console.print(table)
    console.print(
        "slower: large products / products of 8 rows / elementwise / small operations, against the calibration"
    )
    return raw, equal


def add_parser(commands: Any) -> None:
    """Add the command `throughput`."""
    form = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser("throughput", help="times on this machine", description=__doc__, formatter_class=form)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=list(SORTS))
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--calibration", help="file of an earlier calibration; without it, the machine is measured now")
    parser.add_argument(
        "--measured", type=Path, help="file of measured times; those that it lacks are measured and added"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    console = Console(width=170)
    console.print(f"{' '.join(sys.argv)}\n{workloads.machine('cpu')}")
    if args.calibration:
        device = stored_device(args.calibration)
        assert device is not None, f"no file {args.calibration}"
    else:
        with tempfile.TemporaryDirectory() as folder:
            device = calibrate(path=f"{folder}/calibration.json")
    table = Table("number", "value", "source", title="calibration", title_justify="left")
    for row in calibration_rows(device):
        table.add_row(*row)
    console.print(table)
    tokenizer = workloads.tokenizer()
    kept: dict[str, Any] = {}
    if args.measured is not None and args.measured.exists():
        kept = json.loads(args.measured.read_text())
    summary = Table("work", "configurations", "ratio: min", "median", "max", title="estimate / measured")
    for sort in [args.only] if args.only else SORTS:
        for name, ratios in zip(
            (sort, f"{sort}, at equal speed"),
            compare(console, sort, device, tokenizer, args.repeats, kept, args.measured),
            strict=True,
        ):
            numbers = (f"{value:.2f}" for value in (min(ratios), statistics.median(ratios), max(ratios)))
            summary.add_row(name, str(len(ratios)), *numbers)
    console.print(summary)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["throughput", *arguments])
    args.run(args)


if __name__ == "__main__":
    main(sys.argv[1:])
