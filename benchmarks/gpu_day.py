"""Measure what needs a GPU, in five parts of less than nine minutes each.

    python benchmarks/gpu_day.py --part A --data FOLDER --output FOLDER   # then B, C, D and E; or several in turn
    python benchmarks/gpu_day.py --part A B C D E --tiny --data FOLDER --output FOLDER  # the same code on a CPU

A: versions, tests, attention. B: bits of products and of scores. C: speed of scoring. D: precision, memory, loading.
E: training, decoding and the planner. Each row is a line of FOLDER/part_X.jsonl with part, name, parameters, seconds,
and result, error or why it was skipped. The exit code is 1 if a row has an error.

It needs no network and no installation: run it in a checkout, from any folder, with torch and transformers there. What
else is missing can be carried: `scripts/gpu_wheels.sh wheels` on a machine with a network, then on that of the GPU

    python -m pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=$PWD/site
"""

from __future__ import annotations

import argparse
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "tests"))  # whose helpers import each other

import gpu_checks
import gpu_scoring
import gpu_training
import huggingface_hub
import torch
import transformers
import workloads
from gpu_sizes import FULL, TINY, Day, TimeUp

PARTS: Mapping[str, Callable[[Day], None]] = {
    "A": gpu_checks.part_a,
    "B": gpu_checks.part_b,
    "C": gpu_scoring.part_c,
    "D": gpu_scoring.part_d,
    "E": gpu_training.part_e,
}


def _time_up(*_: Any) -> None:
    raise TimeUp("the minutes of the part have passed.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=list(PARTS), required=True, help="parts to run")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="most minutes that a part takes")
    parser.add_argument("--tiny", action="store_true", help="tiny models and batches, on a CPU")
    args = workloads.parse_args(parser)
    args.output.mkdir(parents=True, exist_ok=True)
    if not (args.data / "gsm8k_graded.jsonl.gz").exists():
        sys.exit(f"--data {args.data} has no gsm8k_graded.jsonl.gz: pass the folder with the real conversations.")
    if not args.tiny and not torch.cuda.is_available():
        sys.exit("torch sees no GPU; --tiny runs the same code on a CPU.")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    signal.signal(signal.SIGALRM, _time_up)
    errors = 0
    for part in args.part:
        day = Day(part, args.output, minutes=args.minutes, sizes=TINY if args.tiny else FULL)
        PARTS[part](day)
        errors += day.errors
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
