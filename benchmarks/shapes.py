"""Measure scoring where batches are small, branches are many or short, or texts are long.

    python benchmarks/shapes.py                     # beside transformers, and the floor
    python benchmarks/shapes.py --against CHECKOUT  # beside gym_rm of another checkout, such as a git worktree

Each side has a process of its own, and every round runs all sides one after the other. Tables show medians. All times
include chat templates and tokenisation.

- `transformers`: its forward in padded batches of 32, sorted by length; where that takes minutes, it is left out.
- `floor`: `2 x weights x unique tokens` divided by the rate of the fastest matrix products of scoring.py, measured in
  the same rounds. Attention and everything else come on top.
- With one thread, times are seconds of processor time, which other load on the machine affects less.
- Memory: growth of the peak resident memory of a process (`ru_maxrss`) by the first call after a short one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MANY = "500 replies of one token to 500"
LONG = "one conversation of 16k tokens"  # of a model with 1M weights
MEMORY = "2,000 replies of one token"


def conversations(name: str, tokenizer: Any, first: int) -> list[list[dict[str, str]]]:
    """Return the conversations of a workload; texts are cut from rows of GSM8K, from row `first` on."""
    import workloads

    text = " ".join(message["content"] for one in workloads.gsm8k_groups(200, 1, first=first) for message in one)
    ids = tokenizer(text)["input_ids"]
    words = [word for word in dict.fromkeys(tokenizer.decode([token]).strip() for token in ids) if word.isalpha()]
    words = list(dict.fromkeys([*words, *(f"{word}{number}" for number in range(9) for word in words)]))
    questions = [one[0]["content"] for one in workloads.gsm8k_groups(8, 1, first=first)]

    def cut(tokens: int) -> str:
        return str(tokenizer.decode(ids[:tokens]))

    def pair(question: str, reply: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]

    match name:
        case "500 replies of one token to 500":
            return [pair(cut(490), word) for word in words[:500]]
        case "2,000 replies of one token":
            return [pair(cut(490), word) for word in words[:2000]]
        case "16 replies of 1 to 4 tokens":
            return [pair(questions[0], " ".join(words[k : k + 1 + k % 4])) for k in range(0, 64, 4)]
        case "8 groups of 8 replies of 8 tokens":
            return [
                pair(q, " ".join(words[8 * k : 8 * k + 8])) for n, q in enumerate(questions) for k in range(n, n + 8)
            ]
        case "one conversation of 200 tokens":
            return [pair(cut(100), cut(88))]
        case "one conversation of 4k tokens":
            return [pair(cut(3900), cut(100))]
        case "one conversation of 16k tokens":
            return [pair(cut(15_900), cut(100))]
    raise ValueError(f"unknown workload {name!r}.")


NAMES = (
    "500 replies of one token to 500",
    "16 replies of 1 to 4 tokens",
    "8 groups of 8 replies of 8 tokens",
    "one conversation of 200 tokens",
    "one conversation of 4k tokens",
    LONG,
)


def serve(folders: dict[str, str], side: str, threads: int) -> None:
    """Answer the requests of the parent process, one line each: score the conversations of a file."""
    import torch

    torch.set_num_threads(threads)
    methods: dict[str, Callable[[Any], Any]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        given = json.loads(Path(request["file"]).read_text())
        folder = folders[request["size"]]
        if request["size"] not in methods:
            methods[request["size"]] = _method(side, folder)
            methods[request["size"]](given[:1])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start, cpu = time.perf_counter(), time.process_time()
        found = methods[request["size"]](given)
        wall, busy = time.perf_counter() - start, time.process_time() - cpu
        answer = {"seconds": busy if threads == 1 else wall}
        answer["MiB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
        print(json.dumps(answer | found), flush=True)


def _method(side: str, folder: str) -> Callable[[Any], dict[str, float]]:
    if side == "transformers":
        from scoring import padded
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        score = padded(model, AutoTokenizer.from_pretrained(folder), sort=True)
        return lambda given: {"first": float(score(given)[0])}
    import gym_rm

    scorer: Any = gym_rm.load_scorer(folder)

    def run(given: Any) -> dict[str, float]:
        scores = scorer.score(given)
        return {"first": float(scores.rewards[0]), "tokens": int(scores.workload.unique_tokens)}

    return run


class Side:
    """A process that scores."""

    def __init__(self, name: str, checkout: Path, folders: dict[str, str], threads: int) -> None:
        arguments = ["--serve", json.dumps(folders), "--side", name, "--threads", str(threads)]
        paths = os.pathsep.join([str(checkout), str(ROOT / "benchmarks")])
        self._process = subprocess.Popen(
            [sys.executable, "-B", __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
        )

    def ask(self, size: str, file: Path) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"size": size, "file": str(file)}), file=self._process.stdin, flush=True)
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return answer

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="25M", help="shape of the model, see workloads.py")
    parser.add_argument("--against", type=Path, help="folder of another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[""], help="run only workloads whose name contains one of these")
    parser.add_argument("--first", type=int, default=0, help="index of the first data row, to measure on other rows")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    if "--serve" in sys.argv:
        args = parser.parse_args()
        return serve(args.serve, args.side, args.threads)
    import results
    import torch
    import workloads
    from rich.console import Console
    from rich.table import Table
    from scoring import matmul_rates

    args = workloads.parse_args(parser)
    torch.set_num_threads(args.threads)
    tokenizer = workloads.tokenizer()
    console = Console(width=160)
    console.print(f"python {' '.join(sys.argv)}\n{workloads.machine('cpu')}")
    values: dict[str, Any] = {}
    memory: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        models = {size: workloads.reward_model(size, len(tokenizer)) for size in dict.fromkeys((args.size, "1M"))}
        for size, model in models.items():
            model.save_pretrained(f"{scratch}/{size}")
            tokenizer.save_pretrained(f"{scratch}/{size}")
        folders = {size: f"{scratch}/{size}" for size in models}
        sides = {"gym_rm": ROOT} | ({"other": args.against.resolve()} if args.against else {}) | {"transformers": ROOT}
        table = Table(
            "workload", "tokens", "gym_rm s", "floor s", *(f"{side} / gym_rm" for side in sides if side != "gym_rm")
        )
        running = {side: Side(side, checkout, folders, args.threads) for side, checkout in sides.items()}
        for name in (name for name in NAMES if any(part in name for part in args.only)):
            size = "1M" if name == LONG else args.size
            file = Path(scratch) / "conversations.json"
            file.write_text(json.dumps(conversations(name, tokenizer, args.first)))
            found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            rates = []
            for number in range(args.rounds + 1):  # the first is a warm-up
                for side, process in running.items():
                    if side == "transformers" and name in (MANY, LONG):
                        continue
                    answer = process.ask(size, file)
                    found[side] += [answer] if number else []
                if number:
                    rates.append(max(matmul_rates(models[size], 2048).values()))
            seconds = {
                side: statistics.median(each["seconds"] for each in found[side]) for side in sides if found[side]
            }
            tokens = int(found["gym_rm"][0]["tokens"])
            floor = 2 * workloads.weights(models[size]) * tokens / statistics.median(rates)
            times = {
                side: statistics.median(
                    a["seconds"] / b["seconds"] for a, b in zip(found[side], found["gym_rm"], strict=True)
                )
                for side in sides
                if side != "gym_rm" and found[side]
            }
            values[name] = {"tokens": tokens, "seconds": seconds["gym_rm"], "floor": floor, "times": times}
            table.add_row(
                name,
                f"{tokens:,}",
                f"{seconds['gym_rm']:.4f}",
                f"{floor:.4f}",
                *(f"{times[side]:.2f}" if side in times else "" for side in list(sides)[1:]),
            )
        for process in running.values():
            process.end()
        if any(part in MEMORY for part in args.only):
            file = Path(scratch) / "conversations.json"
            file.write_text(json.dumps(conversations(MEMORY, tokenizer, args.first)))
            peaks = {}
            for side in (side for side in sides if side != "transformers"):
                process = Side(side, sides[side], folders, args.threads)
                peaks[side] = process.ask(args.size, file)["MiB"]
                process.end()
            memory[MEMORY] = {"MiB": peaks}
            console.print(
                f"{MEMORY}: peak memory grows by " + ", ".join(f"{mib:.0f} MiB ({side})" for side, mib in peaks.items())
            )
    console.print(table)
    results.save(args.save, {"time": values, "memory": memory})


if __name__ == "__main__":
    main()
