"""The modes of benchmarks/reward_training.py on a tiny model and a few pairs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import real_data

pytest.importorskip("trl")

ROOT = Path(__file__).parents[2]
FEW = ("--rows", "gsm8k", "--limit", "8", "--max-length", "256", "--batch-size", "4")

pytestmark = [pytest.mark.slow, pytest.mark.data]


def output_of(mode: str, *options: str) -> str:
    command = [sys.executable, "benchmarks/reward_training.py", mode, *FEW, *options]
    command += ["--data", str(real_data.FOLDER)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "140"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_trainers_have_the_same_losses() -> None:
    out = output_of("parity", "--steps", "3", "--micro-batch", "2")
    mean, largest = (float(each) for each in re.findall(r"\d\.\de-\d+", out))
    assert mean <= largest < 1e-4


def test_both_trainers_are_timed() -> None:
    out = output_of("speed", "--size", "1M", "--steps", "1", "--rounds", "1")
    rows = [line for line in out.splitlines() if line.startswith("│") and "." in line.split("│")[2]]
    assert len(rows) == 5
    for row in rows:
        pairs_per_second, ratio = (float(cell) for cell in row.split("│")[2:4])
        assert pairs_per_second > 0
        assert ratio > 0
