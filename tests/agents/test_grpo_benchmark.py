"""benchmarks/grpo.py on tiny models."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import real_data

pytest.importorskip("trl")

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc"),
    pytest.mark.data,
]


def rows_of(*options):
    """Return the cells of the table that the benchmark prints, by the first cell."""
    command = [sys.executable, "benchmarks/grpo.py", "--methods", "ours", "trl", *options]
    command += ["--data", str(real_data.FOLDER)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("| ") and "---" not in line]
    return {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in table)}


def test_both_trainers_are_timed_by_phase_and_sample_as_many_tokens():
    rows = rows_of("--tasks", "gsm8k", "--size", "1M", "--num-prompts", "1", "--steps", "2", "--rounds", "1")
    ours, trl = ([float(cell.rstrip("x")) for cell in rows[name]] for name in ("gym_rm", "TRL"))
    for cells in (ours, trl):
        generate, score, update, step, *_, peak = cells
        assert min(generate, score, update, peak) > 0
        assert generate + score + update == pytest.approx(step, rel=0.02)
    assert ours[-2] == pytest.approx(trl[-2], rel=0.1)  # nearly all replies have 64 tokens


def test_both_trainers_start_with_the_same_reward():
    rows = rows_of("--curves", "--steps", "1", "--seeds", "0")
    ours, trl = (float(cell.split()[0]) for cell in rows["1"])
    assert abs(ours - trl) < 1.5  # of rewards between about -8 and 6, in 128 replies
