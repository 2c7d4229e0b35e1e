"""Peak memory on this CPU as the planner estimates it and as it is measured; see `planner_memory.py -h`.

Each run has a process of its own, forked from one that has only imported. The estimate must not be below what is
measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import planner_runs
import results
import workloads

from gym_rm.lora_settings import LoRASettings
from gym_rm.planning.gpu_memory import ComponentMemory, component_memory
from gym_rm.planning.hardware.devices import device_of_kind
from gym_rm.planning.lengths import Lengths, constant
from gym_rm.planning.model.config_sizes import shape_from_config
from gym_rm.planning.model.shape import ModelShape
from gym_rm.planning.plan import Role
from gym_rm.planning.plan_request import Choice, Component, StepWorkload
from gym_rm.planning.quantities import Basis

CPU = device_of_kind("cpu")


@dataclass(frozen=True)
class Estimate:
    """Estimated peak in bytes, and the instant that sets it."""

    bytes: float
    instant: str


def shape_of(folder: str, *, language_model: bool = False) -> ModelShape:
    config = json.loads((Path(folder) / "config.json").read_text())
    labels = None if language_model else config.get("num_labels", 1) or 1
    return shape_from_config(config, name=Path(folder).name, num_labels=labels)


def estimate(values: dict[str, Any]) -> Estimate:
    """Return the planner's peak of the run that these values describe."""
    return {"scoring": _scoring, "training": _training}[values["work"]](values)


def _of_one(memory: ComponentMemory) -> Estimate:
    instant = max((each for _, found in memory.phases for each in found), key=lambda each: each.bytes)
    return Estimate(memory.peak, instant.name)


def _token_counts(folder: str, conversations: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Return the tokens of prompts, and of replies, with the template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def count(messages: Any, prompt: bool) -> int:
        if tokenizer.chat_template is None:
            return len(tokenizer(" ".join(message["content"] for message in messages))["input_ids"])
        return len(
            tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=True, return_dict=False)
        )

    prompts = [count(list(each[:-1]), True) for each in conversations]
    wholes = [count(list(each), False) for each in conversations]
    return prompts, [max(1, whole - prompt) for whole, prompt in zip(wholes, prompts, strict=True)]


def _measured(values: Sequence[int]) -> Any:
    return Lengths(tuple(map(float, sorted(values))), Basis.MEASURED, "tokens of the rows")


def _scoring(values: dict[str, Any]) -> Estimate:
    prompts, replies = _token_counts(values["model"], planner_runs.conversations(values))
    work = StepWorkload(
        num_prompts=values["num_prompts"],
        group_size=values["group_size"],
        turns=1,
        turn_tokens=0,
        prompts=_measured(prompts),
        replies=_measured(replies),
    )
    model = Component("reward model", Role.REWARD_MODEL, shape_of(values["model"]), values["dtype"], "gym_rm")
    return _of_one(component_memory(model, Choice(max_num_batched_tokens=values["tokens"]), work, CPU))


def _training(values: dict[str, Any]) -> Estimate:
    pairs, length = values["num_prompts"], values["length"]
    accumulated = values.get("accumulate", 1)
    half = constant(length / 2)
    work = StepWorkload(pairs * accumulated, 2, 1, 0, prompts=half, replies=half)
    model = Component(
        "reward training",
        Role.REWARD_TRAINING,
        shape_of(values["model"]),
        "float32",
        "training",
        lora=LoRASettings(rank=values["lora"]) if values.get("lora") else None,
    )
    choice = Choice(max_num_batched_tokens=2 * pairs * length, gradient_checkpointing=bool(values.get("checkpointing")))
    return _of_one(component_memory(model, choice, work, CPU))


# --- the runs ---------------------------------------------------------------------------------------------------------


def _scored(model: str, dtype: str, tokens: int, num_prompts: int, group_size: int, **more: Any) -> dict[str, Any]:
    values = {"work": "scoring", "model": model, "dtype": dtype, "tokens": tokens}
    return values | {"num_prompts": num_prompts, "group_size": group_size} | more


def _trained(model: str, num_prompts: int, length: int, **more: Any) -> dict[str, Any]:
    return {"work": "training", "model": model, "num_prompts": num_prompts, "length": length} | more


LOW = {"stored": "bfloat16"}
CHECKPOINTS = {"checkpointing": True}
RUNS: list[dict[str, Any]] = [
    _scored("qwen3-1M", "float32", 2048, 8, 8),
    _scored("qwen3-1M", "bfloat16", 4096, 8, 8, **LOW),
    _scored("qwen3-25M", "float32", 1024, 2, 8),
    _scored("qwen3-25M", "float32", 4096, 8, 8),
    _scored("qwen3-25M", "float32", 2048, 4, 4, rows="hh"),
    _scored("qwen3-25M", "bfloat16", 2048, 4, 4, **LOW),
    _scored("qwen3-25M", "bfloat16", 1024, 2, 4),
    _scored("qwen3-100M", "float32", 1024, 2, 4),
    _scored("qwen3-100M", "float32", 512, 1, 8),
    _scored("qwen3-100M", "bfloat16", 512, 1, 4, **LOW),
    _scored("qwen3-100M", "bfloat16", 512, 1, 4),
    _scored("qwen3-300M", "float32", 512, 1, 4),
    _scored("qwen3-300M", "bfloat16", 512, 1, 2, **LOW),
    _scored("llama-50M", "float32", 1024, 2, 4),
    _scored("llama-50M", "float32", 2048, 4, 4, rows="hh"),
    _scored("llama-50M", "bfloat16", 1024, 2, 4, **LOW),
    _scored("mistral-45M", "float32", 2048, 4, 4, rows="hh"),
    _scored("mistral-45M", "bfloat16", 512, 1, 4, **LOW),
    _scored("gemma2-35M", "float32", 1024, 2, 4),
    _scored("gemma2-35M", "float32", 2048, 2, 4, rows="hh"),
    _scored("gemma3-35M", "float32", 1024, 2, 4),
    _scored("gemma3-35M", "bfloat16", 1024, 2, 2, **LOW),
    _scored("mixtral-85M", "float32", 512, 1, 4),
    _scored("mixtral-85M", "float32", 1024, 2, 4),
    _trained("qwen3-1M", 4, 128),
    _trained("qwen3-1M", 8, 256),
    _trained("qwen3-1M", 8, 128, **CHECKPOINTS),
    _trained("qwen3-25M", 1, 64, accumulate=2),
    _trained("qwen3-25M", 1, 128),
    _trained("qwen3-25M", 2, 256),
    _trained("qwen3-25M", 1, 256, **CHECKPOINTS),
    _trained("qwen3-25M", 2, 128, lora=8),
    _trained("qwen3-100M", 1, 128),
    _trained("qwen3-100M", 1, 200, **CHECKPOINTS),
    _trained("qwen3-100M", 1, 128, lora=16),
    _trained("qwen3-100M", 1, 128, lora=16, **CHECKPOINTS),
    _trained("llama-50M", 1, 128),
    _trained("llama-50M", 1, 200, **CHECKPOINTS),
    _trained("mistral-45M", 1, 256),
    _trained("mistral-45M", 1, 256, lora=4),
    _trained("gemma2-35M", 1, 150),
    _trained("gemma3-35M", 1, 128),
    _trained("qwen2-30M", 2, 128),
    _trained("mixtral-85M", 1, 80),
]
QUICK = [0, 2, 13, 18, 24, 28, 32, 36, 42]


def prepare(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values with a folder in place of a model's name; make the model in a process of its own."""
    values = {"threads": 1} | values
    name, dtype = values["model"], values.pop("stored", "float32")
    if not Path(name).is_dir():
        values["model"] = _in_process(lambda: str(planner_runs.make_model(name, folder, dtype=dtype)))
    return values


def _in_process(work: Any) -> Any:
    """Return what a function returns in a forked process, as JSON."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with open(os.dup(2), "w") as stderr, contextlib.redirect_stdout(stderr):
            try:
                answer = {"result": work()}
            except BaseException:
                answer = {"error": traceback.format_exc()[-2000:]}
        with os.fdopen(writer, "w") as stream:
            stream.write(json.dumps(answer))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    answer = json.loads(text or '{"error": "the process ended without an answer"}')
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["result"]


def measured_peaks(values: dict[str, Any]) -> dict[str, int]:
    """Return the peak of each instant in bytes above the baseline, measured in a process of its own."""
    peaks: dict[str, int] = _in_process(lambda: planner_runs.measure(values).peaks)
    return peaks


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="nine runs")
    parser.add_argument("--only", choices=("scoring", "training"), help="only runs of this sort")
    parser.add_argument("--folder", type=Path, help="where models with random weights are kept between calls")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--work", choices=("scoring", "training"), help="one run of your own, with the options below")
    parser.add_argument("--model", help="name of a model of the table, or a folder")
    for name, default, text in (
        ("num-prompts", 2, "prompts, or pairs in training"),
        ("group-size", 4, "replies to each prompt"),
        ("tokens", 2048, "scoring: max_num_batched_tokens"),
        ("length", 128, "training: tokens of each text"),
        ("accumulate", 1, "training: forwards and backwards in one step"),
        ("lora", 0, "training: rank of LoRA"),
        ("steps", 3, "repetitions"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    parser.add_argument("--dtype", default="float32", help="scoring: dtype of the weights")
    parser.add_argument("--rows", default="gsm8k", choices=("gsm8k", "hh"), help="scoring: which conversations")
    parser.add_argument("--checkpointing", action="store_true", help="training: gradient checkpointing")
    return parser


def _chosen(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if arguments.work:
        if not arguments.model:
            sys.exit("--work needs --model: a folder, or a name of the table")
        skipped = ("quick", "only", "folder", "data", "save")
        return [{key: value for key, value in vars(arguments).items() if key not in skipped and value is not None}]
    runs = [RUNS[k] for k in QUICK] if arguments.quick else RUNS
    runs = [values for values in runs if arguments.only in (None, values["work"])]
    return [{**values, "threads": arguments.threads} for values in runs]


def main(options: list[str] | None = None) -> None:
    """Measure the chosen runs, and print each beside its estimate."""
    arguments = workloads.parse_args(_parser(), options)
    found: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        for values in _chosen(arguments):
            prepared = prepare(values, folder)
            guess = estimate(prepared)
            try:
                peaks = measured_peaks(prepared)
            except RuntimeError as error:
                print(f"{_text(values)}: failed: {error}", flush=True)
                continue
            instant, peak = max(peaks.items(), key=lambda item: item[1])
            found.setdefault(values["work"], []).append(guess.bytes / peak)
            print(
                f"{_text(values):95} estimate {guess.bytes / 2**20:7.0f} MiB ({guess.instant}), measured "
                f"{peak / 2**20:7.0f} MiB ({instant}), ratio {guess.bytes / peak:.3f}",
                flush=True,
            )
    for line in summary(found):
        print(line)
    values = {
        work: {
            "runs": len(ratios),
            "min": min(ratios),
            "median": statistics.median(ratios),
            "max": max(ratios),
            "below measured": sum(ratio < 1 for ratio in ratios),
        }
        for work, ratios in found.items()
    }
    results.save(arguments.save, values)
    print(f"{workloads.machine('cpu')}\n{shlex.join(['python', *sys.argv])}")


def _text(values: dict[str, Any]) -> str:
    hidden = ("work", "model", "threads")
    settings = " ".join(
        f"{key}={Path(str(value)).name}" for key, value in values.items() if key not in hidden and value
    )
    return f"{values['work']} {Path(values['model']).name} {settings}"


def summary(found: dict[str, list[float]]) -> Iterator[str]:
    """Yield the lines of the summary table."""
    yield "| work | runs | estimate/measured: min | median | max | below measured | above 1.10 |"
    yield "|---|---|---|---|---|---|---|"
    every = [ratio for ratios in found.values() for ratio in ratios]
    for work, ratios in {**found, "all": every}.items():
        if ratios:
            low, high = sum(r < 1 for r in ratios), sum(r > 1.1 for r in ratios)
            numbers = f"{min(ratios):.3f} | {statistics.median(ratios):.3f} | {max(ratios):.3f}"
            yield f"| {work} | {len(ratios)} | {numbers} | {low} | {high} |"


if __name__ == "__main__":
    main()
