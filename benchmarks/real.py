"""Measure small real models beside transformers, TRL and a real vLLM: seconds, errors, flips and memory.

    python benchmarks/real.py [--vllm FOLDER] [--only scoring grpo] [--pairs 40]      # 15 minutes on two cores

The models are SmolLM2-135M-Instruct and all-MiniLM-L6-v2 (`scripts/real_models.py`), each with a random head of one
number. Conversations are preference pairs of HH, and groups of 8 replies to one dialogue.

- The reference of all errors is transformers in float64, one conversation at a time. The error is the mean distance
  from it over the standard deviation of its scores; a flip is a pair whose order changes or becomes a tie.
- `transformers` runs padded batches of 32, sorted by length; `TRL` is `GRPOTrainer._calculate_rewards`. vLLM has blocks
  of 32 tokens, and gets token ids, as in vllm_peer.py.
- Seconds are those of the processor. Memory is the peak of the whole process, with its libraries, and with the gigabyte
  that vLLM has for keys and values.
- GRPO and reward training are steps of grpo.py and reward_training.py with all weights of SmolLM2 in float32.

Each method has a process of its own. What was measured is saved after each case; a setting that is refused has no row.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpo
import numpy as np
import results
import scoring
import torch
import transformers
import vllm_peer
import workloads
from rich.console import Console
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from workloads import Conversation

import gym_rm
from gym_rm.cli.real_models import fetch
from gym_rm.errors import ConfigError

MODELS = {"SmolLM2": "smollm2", "MiniLM": "minilm"}
OURS = {
    "gym_rm, float32": {"dtype": "float32"},
    "gym_rm, bfloat16": {"dtype": "bfloat16"},
    "gym_rm, int8": {"dtype": "float32", "quantization": "int8", "check": False},
}
PEERS = [f"{name}, {dtype}" for name in ("transformers", "vLLM") for dtype in ("float32", "bfloat16")]
SCORING = ["float64", *OURS, "TRL", *PEERS]
ONLY_DECODERS = ("TRL", "vLLM")  # they render a chat template, or take token ids without segments
CASES = ("scoring", "grpo", "training")
REFUSED = 3  # exit status of a worker whose setting is refused
LONGEST = 500  # tokens of a conversation, for MiniLM's positions
Method = Callable[[Sequence[Conversation]], "np.ndarray[Any, Any]"]


def encode(tokenizer: Any, conversation: Conversation) -> dict[str, Any]:
    """Return the inputs of transformers: by the chat template, or as a pair of texts without one."""
    if tokenizer.chat_template:
        return {"input_ids": tokenizer.apply_chat_template(conversation, return_dict=False)}
    context = "\n".join(message["content"] for message in conversation[:-1])
    return dict(tokenizer(context, conversation[-1]["content"]))


def plain(model: Any, tokenizer: Any, batch_size: int) -> Method:
    """Score with transformers in padded batches, sorted by length."""

    @torch.inference_mode()
    def score(conversations: Sequence[Conversation]) -> np.ndarray[Any, Any]:
        rows = [encode(tokenizer, each) for each in conversations]
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]["input_ids"]))
        rewards = torch.empty(len(rows), dtype=torch.float64)
        for start in range(0, len(rows), batch_size):
            chosen = order[start : start + batch_size]
            batch = tokenizer.pad([rows[row] for row in chosen], return_tensors="pt", padding_side="right")
            rewards[chosen] = model(**batch).logits[:, 0].double()
        return rewards.numpy()

    return score


def load(method: str, folder: str) -> Method:
    """Return what scores conversations by a method."""
    if method in OURS:
        scorer = gym_rm.load_scorer(folder, device="cpu", **OURS[method])
        return lambda conversations: scorer.score(conversations).rewards
    dtype = {"TRL": "float32", "float64": "float64"}.get(method) or method.split(", ")[1]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if method == "TRL":
        return scoring.trl(model, tokenizer)
    return plain(model, tokenizer, batch_size=1 if method == "float64" else 32)


def made(name: str, folder: Path) -> str:
    """Write a real model with a random head of one number, and return its folder."""
    source, target = fetch(MODELS[name]), folder / name
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return str(target)


def make_workloads(args: argparse.Namespace, folder: str) -> dict[str, list[Conversation]]:
    """Return pairs, and groups of 8, that are not too long for any of the models."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = {}
    for name, count, size in (("pairs", args.pairs, 2), ("groups", max(1, args.pairs // 10), 8)):
        every = workloads.hh_groups(4 * count + 8, size)
        groups = [every[start : start + size] for start in range(0, len(every), size)]
        # For an empty reply, transformers writes one text instead of a pair.
        groups = [group for group in groups if all(one[-1]["content"].strip() for one in group)]
        short = (g for g in groups if max(len(encode(tokenizer, one)["input_ids"]) for one in g) <= LONGEST)
        found[name] = [one for group, _ in zip(short, range(count), strict=False) for one in group]
    return found


# --- one method in a process of its own -------------------------------------------------------------------------------


def peak(process: str) -> float:
    """Return the most memory that a process had, in MiB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def measured(score: Method, of: dict[str, list[Conversation]]) -> dict[str, Any]:
    """Return seconds of the processor and the clock for each workload, and its rewards."""
    found: dict[str, Any] = {}
    score(of["pairs"][:2])
    for name, conversations in of.items():
        processor, clock = time.process_time(), time.perf_counter()
        rewards = score(conversations)
        found[name] = {"processor": time.process_time() - processor, "clock": time.perf_counter() - clock}
        found[name]["rewards"] = rewards.tolist()
    return found


def train(method: str, folder: str, pairs: list[Conversation]) -> dict[str, Any]:
    """Return the seconds and the losses of two steps of reward training with half of the pairs each."""
    from reward_trainers import Job, Pair
    from reward_trainers import train as train_by

    tokenizer, chosen = AutoTokenizer.from_pretrained(folder), []
    for first, second in zip(pairs[::2], pairs[1::2], strict=True):
        ids = tuple(encode(tokenizer, each)["input_ids"] for each in (first, second))
        chosen.append(Pair(first[:-1], first[-1:], second[-1:], ids))
    run = train_by(method, Job(Path(folder), chosen, batch_size=max(1, len(chosen) // 2), learning_rate=1e-5))
    return {"processor": run.processor, "clock": run.wall, "loss": run.losses[-1]}


def work(args: argparse.Namespace) -> None:
    """Run a method, and print what it came to."""
    of = make_workloads(args, args.folder)
    try:
        if args.case == "training":
            found = train(args.worker, args.folder, of["pairs"][: 2 * max(2, args.pairs // 5)])
        else:
            found = measured(load(args.worker, args.folder), of)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)
    print(json.dumps(found | {"MiB": peak("self")}))


def start(method: str, case: str, folder: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """Return what a method came to in a process of its own; None if its setting is refused."""
    command = [sys.executable, __file__, "--worker", method, "--case", case, "--folder", folder]
    command += ["--pairs", str(args.pairs), "--threads", str(args.threads), "--data", str(args.data)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, REFUSED):
        sys.exit(f"{method} failed:\n{done.stderr[-4000:]}")
    if done.returncode == REFUSED:
        print(f"{method} is refused: {done.stderr.strip()[-600:]}")
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def vllm(method: str, folder: str, args: argparse.Namespace, versions: dict[str, str]) -> dict[str, Any]:
    """Return what vLLM came to, in its environment."""
    args.vllm = args.vllm or vllm_peer.environment()
    options = {"runner": "pooling", "dtype": method.split(", ")[1]} | vllm_peer.BLOCKS
    peer = vllm_peer.VLLM(args.vllm, Path(folder), args.threads, alone=True, **options)
    versions["vllm"], tokenizer = peer.version, AutoTokenizer.from_pretrained(folder)
    found: dict[str, Any] = {}
    for name, conversations in make_workloads(args, folder).items():
        ids = [encode(tokenizer, each)["input_ids"] for each in conversations]
        peer.ask("classify", ids[:2])
        done = peer.ask("classify", ids)
        found[name] = {"processor": done.processor, "clock": done.clock, "rewards": done.found}
    found["MiB"] = peak(str(peer._process.pid))
    peer.close()
    return found


# --- cases ------------------------------------------------------------------------------------------------------------


def row_of(found: dict[str, Any], reference: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a method: seconds, times of gym_rm in float32, distance from float64, and memory."""
    row: dict[str, Any] = {"MiB": found["MiB"]}
    for name in ("pairs", "groups"):
        row[name] = {clock: found[name][clock] for clock in ("processor", "clock")}
        row[name]["times"] = found[name]["processor"] / ours[name]["processor"]
    rewards, exact = (np.array(each["pairs"]["rewards"]) for each in (found, reference))
    row["error"] = np.abs(rewards - exact).mean() / exact.std()
    row["correlation"] = np.corrcoef(rewards, exact)[0, 1]
    row["flips"] = int((np.sign(rewards[::2] - rewards[1::2]) != np.sign(exact[::2] - exact[1::2])).sum())
    return row


def score_all(
    name: str, folder: str, args: argparse.Namespace, versions: dict[str, str], save: Callable[[dict[str, Any]], None]
) -> None:
    """Measure all methods of scoring a model, and save the rows after each."""
    raw: dict[str, dict[str, Any]] = {}
    for method in SCORING:
        if MODELS[name] == "minilm" and method.startswith(ONLY_DECODERS):
            continue
        found = vllm(method, folder, args, versions) if "vLLM" in method else start(method, "scoring", folder, args)
        if found is not None:
            raw[method] = found
            if "gym_rm, float32" in raw:
                rows = {m: row_of(each, raw["float64"], raw["gym_rm, float32"]) for m, each in raw.items()}
                del rows["float64"]
                save(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=CASES, choices=CASES, help="cases to run")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), help="models to score with")
    parser.add_argument("--pairs", type=int, default=40, help="preference pairs; fewer groups and prompts")
    parser.add_argument("--steps", type=int, default=2, help="steps of GRPO, of which the first is not counted")
    parser.add_argument("--vllm", type=Path, help="folder of the environment that has vLLM")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = workloads.parse_args(parser)
    torch.set_num_threads(args.threads)
    sys.path.insert(0, str(vllm_peer.ROOT))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if args.worker:
        work(args)
        return
    console = Console(width=160)
    console.print(f"python {' '.join(sys.argv)}\n{workloads.machine('cpu')}")
    values: dict[str, Any] = {"pairs": args.pairs, "scoring": {}}
    versions: dict[str, str] = {}

    def save(part: dict[str, Any], *path: str) -> None:
        """Put a part where it belongs, print it and save all."""
        inner = functools.reduce(lambda found, each: found.setdefault(each, {}), path[:-1], values)
        inner[path[-1]] = part
        console.print(*path, results.plain(part))
        results.save(args.save, values, peers=["trl"], versions=versions)

    with tempfile.TemporaryDirectory() as name:
        folders = {each: made(each, Path(name)) for each in {"SmolLM2", *args.models}}
        if "scoring" in args.only:
            for each in args.models:
                save_rows = functools.partial(lambda rows, each: save(rows, "scoring", each), each=each)
                score_all(each, folders[each], args, versions, save_rows)
        if "training" in args.only:
            runs = {name: start(method, "training", folders["SmolLM2"], args) for method, name in
                    (("ours", "gym_rm"), ("trl", "TRL"))}  # fmt: skip
            for run in runs.values():
                run["times"] = run["processor"] / runs["gym_rm"]["processor"]
            save(runs, "training")
        if "grpo" in args.only:
            task = grpo.Task(
                str(fetch("smollm2")), folders["SmolLM2"], str(workloads.DATA / "gsm8k_graded.jsonl.gz"),
                num_prompts=max(1, args.pairs // 20), max_new_tokens=32, learning_rate=1e-6, steps=args.steps,
            )  # fmt: skip
            options = argparse.Namespace(
                methods=["ours", "trl"], rounds=1, micro_batch=8, threads=args.threads, curves=False
            )
            save(grpo.compare("SmolLM2", task, options, console), "grpo")


if __name__ == "__main__":
    main()
