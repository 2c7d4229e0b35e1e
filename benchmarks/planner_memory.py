"""Peak memory on this CPU as the planner estimates it and as it is measured; see `planner.py memory -h`.

Each run has a process of its own, forked from one that has only imported. The estimate must not be below what is
measured, and at most 10 % above it.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
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

from gym_rm.planning.hardware.devices import device_of_kind
from gym_rm.planning.memory import ComponentMemory, component_memory
from gym_rm.planning.model.configs import shape_from_config
from gym_rm.planning.model.loading import ModelShape
from gym_rm.planning.plan import Role
from gym_rm.planning.quantities import Basis
from gym_rm.planning.request import Choice, Component, Workload
from gym_rm.planning.workload.lengths import constant, from_values

CPU = device_of_kind("cpu")
BUDGET = 2048  # of the scorer of agents/grpo.py on a CPU


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
    return {"scoring": _scoring, "training": _training, "grpo": _grpo}[values["work"]](values)


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
    return from_values(values, basis=Basis.MEASURED, source="tokens of the rows")


def _scoring(values: dict[str, Any]) -> Estimate:
    from planner_runs import conversations

    prompts, replies = _token_counts(values["model"], conversations(values))
    work = Workload(
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
    work = Workload(pairs * accumulated, 2, 1, 0, prompts=half, replies=half)
    model = Component(
        "reward training",
        Role.REWARD_TRAINING,
        shape_of(values["model"]),
        "float32",
        "training",
        lora_rank=values.get("lora", 0),
    )
    choice = Choice(max_num_batched_tokens=2 * pairs * length, gradient_checkpointing=bool(values.get("checkpointing")))
    return _of_one(component_memory(model, choice, work, CPU))


def _grpo(values: dict[str, Any]) -> Estimate:
    """Return the peak of agents/grpo.py: one component works at a time, and the others stay where they are."""
    with open(values["prompts"]) as lines:
        prompts = [json.loads(line)["prompt"] for line in lines]
    counts, _ = _token_counts(values["model"], [[*prompt, {"role": "assistant", "content": ""}] for prompt in prompts])
    work = Workload(
        num_prompts=values["num_prompts"],
        group_size=values["group_size"],
        turns=1,
        turn_tokens=0,
        prompts=_measured(counts),
        replies=constant(values["reply"]),
        updates_per_step=values.get("updates_per_step", 1),
    )
    conversations = work.conversations
    policy = shape_of(values["model"], language_model=True)
    padded = min(values["micro_batch_size"], conversations) * work.longest
    choice = Choice(max_num_batched_tokens=padded, max_num_seqs=conversations)
    parts = [
        (Component("policy", Role.POLICY, policy, "float32", "training"), choice),
        (Component("generation", Role.GENERATION, policy, "float32", "transformers"), choice),
        (
            Component("reward model", Role.REWARD_MODEL, shape_of(values["reward_model"]), "float32", "gym_rm"),
            Choice(max_num_batched_tokens=BUDGET),
        ),
    ]
    if values.get("kl_coef"):
        parts.append((Component("reference", Role.REFERENCE, policy, "float32", "transformers"), choice))
    memories = [component_memory(component, choice, work, CPU) for component, choice in parts]
    best = Estimate(0.0, "")
    for index, ((component, _), memory) in enumerate(zip(parts, memories, strict=True)):
        waiting = sum(item.bytes for k, other in enumerate(memories) if k != index for item in other.resident)
        one = _of_one(memory)
        best = max(best, Estimate(one.bytes + waiting, f"{component.name}: {one.instant}"), key=lambda e: e.bytes)
    return best


# --- the runs ---------------------------------------------------------------------------------------------------------


def _scored(model: str, dtype: str, tokens: int, num_prompts: int, group_size: int, **more: Any) -> dict[str, Any]:
    values = {"work": "scoring", "model": model, "dtype": dtype, "tokens": tokens}
    return values | {"num_prompts": num_prompts, "group_size": group_size} | more


def _trained(model: str, num_prompts: int, length: int, **more: Any) -> dict[str, Any]:
    return {"work": "training", "model": model, "num_prompts": num_prompts, "length": length} | more


def _agent(model: str, reward_model: str, num_prompts: int, group_size: int, reply: int, **more: Any) -> dict[str, Any]:
    values = {"work": "grpo", "model": model, "reward_model": reward_model, "num_prompts": num_prompts}
    return values | {"group_size": group_size, "reply": reply, "micro_batch_size": 8} | more


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
    _scored("gpt2-95M", "float32", 512, 1, 4),
    _scored("gpt2-95M", "float32", 1024, 2, 4),
    _scored("mixtral-85M", "float32", 512, 1, 4),
    _scored("mixtral-85M", "float32", 1024, 2, 4),
    _scored("modernbert-45M", "float32", 1024, 2, 4),
    _scored("modernbert-45M", "float32", 2048, 4, 4),
    _scored("deberta-30M", "float32", 512, 2, 2),
    _scored("deberta-30M", "float32", 1024, 2, 4),
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
    _trained("gpt2-95M", 1, 64),
    _trained("qwen2-30M", 2, 128),
    _trained("mixtral-85M", 1, 80),
    _trained("modernbert-45M", 1, 128),
    _trained("deberta-30M", 1, 96),
    _agent("qwen3-1M", "qwen3-1M", 8, 8, 32, micro_batch_size=32),
    _agent("qwen3-1M", "qwen3-1M", 4, 4, 64, kl_coef=0.1),
    _agent("qwen3-1M", "qwen3-25M", 4, 4, 32, updates_per_step=2),
    _agent("qwen3-25M", "qwen3-1M", 2, 4, 24),
    _agent("qwen3-25M", "qwen3-25M", 2, 4, 24, kl_coef=0.1),
    _agent("qwen3-25M", "qwen3-1M", 2, 4, 24, micro_batch_size=4, updates_per_step=2),
    _agent("llama-50M", "qwen3-1M", 2, 2, 16, micro_batch_size=4),
    _agent("qwen2-30M", "llama-50M", 2, 4, 16, micro_batch_size=4, kl_coef=0.1),
    _agent("gemma3-35M", "modernbert-45M", 2, 2, 16, micro_batch_size=2),
    _agent("gpt2-95M", "qwen3-1M", 2, 2, 16, micro_batch_size=2),
]
QUICK = [0, 2, 13, 18, 26, 30, 34, 36, 42, 53]


def prepare(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values with folders in place of names; make the models in a process of their own."""
    values = {"threads": 1} | values
    stored = values.pop("stored", "float32")
    for key in ("model", "reward_model"):
        name = values.get(key)
        if name is None or Path(name).is_dir():
            continue
        policy = values["work"] == "grpo" and key == "model"
        dtype = stored if key == "model" else "float32"
        path = folder / f"{name}{'-policy' if policy else ''}-{dtype}"
        if not (path / "config.json").exists():
            _in_process(lambda n=name, p=policy, d=dtype: str(_runs().make_model(n, folder, policy=p, dtype=d)))
        values[key] = str(path)
    if values["work"] == "grpo":
        values["output"] = tempfile.mkdtemp(prefix="grpo-", dir=folder)
        values.setdefault("prompts", str(_prompts(folder, values["num_prompts"])))
    return values


def _prompts(folder: Path, number: int) -> Path:
    """Write real prompts of nearly the same length, so that the longest is in every step."""
    import workloads

    path = folder / f"prompts-{number}.jsonl"
    with gzip.open(workloads.DATA / "gsm8k_train.jsonl.gz", "rt") as rows:
        questions = sorted((json.loads(row)["question"] for row in rows), key=len)
    wanted = -(-4 * number // 3)
    start = 2 * len(questions) // 5
    lines = [json.dumps({"prompt": [{"role": "user", "content": each}]}) for each in questions[start : start + wanted]]
    path.write_text("\n".join(lines))
    return path


def _runs() -> Any:
    import planner_runs

    return planner_runs


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
    peaks: dict[str, int] = _in_process(lambda: _runs().measure(values).peaks)
    return peaks


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="planner.py memory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="ten runs")
    parser.add_argument("--only", choices=("scoring", "training", "grpo"), help="only runs of this sort")
    parser.add_argument("--every", metavar="K/N", default="0/1", help="only runs K, K + N, K + 2N, ...")
    parser.add_argument("--folder", type=Path, help="where models with random weights are kept between calls")
    parser.add_argument("--output", type=Path, help="JSON Lines to append the results to")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument(
        "--work", choices=("scoring", "training", "grpo"), help="one run of your own, with the options below"
    )
    parser.add_argument("--model", help="name of a model of the table, or a folder")
    parser.add_argument("--reward-model", help="grpo: the same")
    for name, default, text in (
        ("num-prompts", 2, "prompts, or pairs in training"),
        ("group-size", 4, "replies to each prompt"),
        ("tokens", 2048, "scoring: max_num_batched_tokens"),
        ("length", 128, "training: tokens of each text"),
        ("reply", 32, "grpo: tokens of each reply"),
        ("micro-batch-size", 8, "grpo: replies in one forward and backward"),
        ("updates-per-step", 1, "grpo: updates in a step"),
        ("accumulate", 1, "training: forwards and backwards in one step"),
        ("lora", 0, "training: rank of LoRA"),
        ("steps", 3, "repetitions"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    parser.add_argument("--dtype", default="float32", help="scoring: dtype of the weights")
    parser.add_argument("--rows", default="gsm8k", choices=("gsm8k", "hh"), help="scoring: which conversations")
    parser.add_argument("--kl-coef", type=float, default=0.0, help="grpo: above 0 with a reference")
    parser.add_argument("--checkpointing", action="store_true", help="training: gradient checkpointing")
    return parser


def _chosen(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if arguments.work:
        if not arguments.model:
            sys.exit("--work needs --model: a folder, or a name of the table")
        skipped = ("quick", "only", "every", "folder", "output")
        return [{key: value for key, value in vars(arguments).items() if key not in skipped and value is not None}]
    first, step = map(int, arguments.every.split("/"))
    runs = [RUNS[k] for k in QUICK] if arguments.quick else RUNS
    runs = [values for values in runs if arguments.only in (None, values["work"])]
    return [{**values, "threads": arguments.threads} for values in runs[first::step]]


def main(options: list[str] | None = None) -> None:
    """Run the sub-command `memory`."""
    arguments = _parser().parse_args(options)
    import planner_runs
    import workloads

    planner_runs.load_agent()
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
            if arguments.output:
                with arguments.output.open("a") as lines:
                    lines.write(json.dumps({"spec": prepared, "res": {"peaks": peaks}}) + "\n")
    for line in summary(found):
        print(line)
    print(f"{workloads.machine('cpu')}\n{shlex.join(['python', *sys.argv])}")


def _text(values: dict[str, Any]) -> str:
    hidden = ("work", "model", "threads", "output", "prompts")
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
