"""Measure what needs a GPU, in five parts of less than nine minutes each, after gpu_first.py.

    python benchmarks/gpu_day.py --part A --data FOLDER --output FOLDER   # then B, C, D and E; or several in turn
    python benchmarks/gpu_day.py --part A B C D E --tiny --data FOLDER --output FOLDER  # the same code on a CPU

A: versions, tests, attention. B: bits of products and of scores. C: speed of scoring. D: precision, memory, loading.
E: training, decoding and the planner. Each row is a line of FOLDER/part_X.jsonl with part, name, parameters, seconds,
and result, error or why it was skipped, and what was logged. The exit code is 1 if a row has an error, such as that a
model does not run as the package promises: as a tree, with the fused forward, on a GPU with its kernels.

It needs no network and no installation: run it in a checkout, from any folder, with torch and transformers there. What
else is missing can be carried: `scripts/gpu_wheels.sh wheels` on a machine with a network, then on that of the GPU

    python -m pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=$PWD/site

`--kernels FOLDER` keeps compiled kernels, and OUTPUT/kernels.tar.gz brings them to the next machine, whose run reads
them with `--read-kernels kernels.tar.gz` into the same FOLDER.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "tests"))  # whose helpers import each other

import gpu_checks
import gpu_command
import gpu_scoring
import gpu_training
from gpu_sizes import Day

PARTS: Mapping[str, Callable[[Day], None]] = {
    "A": gpu_checks.part_a,
    "B": gpu_checks.part_b,
    "C": gpu_scoring.part_c,
    "D": gpu_scoring.part_d,
    "E": gpu_training.part_e,
}

if __name__ == "__main__":
    gpu_command.run(__doc__ or "", PARTS, dict.fromkeys(PARTS, 9.0))
