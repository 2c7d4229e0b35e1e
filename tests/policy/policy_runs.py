"""Small GRPO runs of the embedded policy for the tests, and what they wrote. Not a test."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

from agents import grpo
from gym_rm.config import load_config
from gym_rm.policy.grpo_settings import GRPOSettings

ROOT = Path(__file__).parents[2]
SMALL = (
    "env.num_prompts=4",
    "env.group_size=4",
    "eval.num_prompts=8",
    "eval.every=2",
    "steps=4",
    "sampling.max_new_tokens=8",
)


def settings_of(folder: Path, *overrides: str) -> GRPOSettings:
    return grpo.fill_defaults(load_config(GRPOSettings, None, [*SMALL, f"output={folder}", *overrides]))


def train(folder: Path, *overrides: str) -> Any:
    """Train in this process; return why the run ended."""
    return grpo.train(settings_of(folder, *overrides), Console(quiet=True))


def start(*overrides: str, processes: int = 1, path: Path = ROOT) -> subprocess.Popen[str]:
    """Start a run in processes of its own, which find modules in `path`."""
    world = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    return subprocess.Popen(
        [sys.executable, *world, str(ROOT / "agents" / "grpo.py"), *SMALL, *overrides],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{path}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(*overrides: str, processes: int = 1, path: Path = ROOT) -> str:
    """Run to the end in processes of its own, and return the output."""
    process = start(*overrides, processes=processes, path=path)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    return output


def curve(path: Path) -> list[dict[str, str]]:
    """Return the lines of a curve without the columns that depend on the time."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if "second" not in name} for row in rows]


def require_same_run(run: Path, other: Path) -> None:
    """Assert that two runs wrote the same: curves, conversations and weights, bit for bit."""
    for name in ("metrics.csv", "held_out.csv"):
        assert curve(run / name) == curve(other / name)
    assert (run / "conversations.jsonl").read_text() == (other / "conversations.jsonl").read_text()
    models = sorted(path.relative_to(other) for path in other.rglob("model.safetensors"))
    assert models == sorted(path.relative_to(run) for path in run.rglob("model.safetensors"))
    for model in models:
        ours, theirs = load_file(run / model), load_file(other / model)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), model
    assert not list(run.rglob(".*"))


def failing_now_and_then(conversations: Any) -> list[float]:
    """Score replies by their length; about one of five has no score."""
    lengths = [len(messages[-1]["content"]) for messages in conversations]
    return [float("nan") if length % 5 == 0 else float(length % 7) for length in lengths]


def lengths_and_vowels(conversations: Any) -> list[float]:
    """Score the last reply."""
    replies = [messages[-1]["content"] for messages in conversations]
    return [len(reply) % 7 + 0.5 * sum(each in "aeiou" for each in reply) for reply in replies]
