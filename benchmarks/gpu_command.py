"""The command line of gpu_first.py and gpu_day.py: parts one after another, and the caches of compiled kernels."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tarfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
import workloads
from gpu_sizes import FULL, TINY, Day, TimeUp

CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}  # read when a kernel is compiled
ARCHIVE = "kernels.tar.gz"
PLACE = "place.txt"  # in the archive: the folder of the kernels, whose absolute path is in Triton's files


def read_kernels(folder: Path, archive: Path | None) -> None:
    """Let this process keep compiled kernels in a folder, filled from an earlier run's archive."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if archive is not None:
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        if (place := (folder / PLACE).read_text()) != str(folder):
            sys.exit(f"{archive} has kernels of {place}, which work in this folder only: pass --kernels {place}.")
    os.environ |= {name: str(folder / inner) for name, inner in CACHES.items()}


def save_kernels(folder: Path, output: Path) -> None:
    """Write the kernels of a folder to an archive in `output`."""
    (folder / PLACE).write_text(str(folder.resolve()))
    with tarfile.open(output / ARCHIVE, "w:gz") as file:
        file.add(folder, arcname=".")


def _time_up(*_: Any) -> None:
    raise TimeUp("the minutes of the part have passed.")


def run(
    doc: str,
    parts: Mapping[str, Callable[..., None]],
    minutes: Mapping[str, float],
    choices: Mapping[str, tuple[list[str], str]] | None = None,
) -> None:
    """Run the parts that the command line names, each with so many minutes at most.

    Args:
        doc: text of the script.
        parts: what each part runs, given a `Day` and the options of `choices`.
        minutes: of each part.
        choices: further options of all parts by name: their values, all of which are the default, and their help.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=list(parts), required=True, help="parts to run")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, help="most minutes that a part takes")
    parser.add_argument("--tiny", action="store_true", help="tiny models and batches, on a CPU")
    parser.add_argument("--kernels", type=Path, help=f"folder of compiled kernels, also written to OUTPUT/{ARCHIVE}")
    parser.add_argument("--read-kernels", type=Path, metavar="FILE", help=f"{ARCHIVE} of an earlier run")
    for name, (values, text) in (choices or {}).items():
        parser.add_argument(f"--{name}", nargs="+", choices=values, default=values, help=text)
    args = workloads.parse_args(parser)
    if args.read_kernels is not None and args.kernels is None:
        parser.error("--read-kernels needs --kernels, the folder of the run that wrote the file.")
    args.output.mkdir(parents=True, exist_ok=True)
    for name in ("gsm8k_graded.jsonl.gz", "hh_harmless.jsonl.gz"):
        if not (args.data / name).exists():
            sys.exit(f"--data {args.data} has no {name}: pass the folder with the real conversations.")
    if not args.tiny and not torch.cuda.is_available():
        sys.exit("torch sees no GPU; --tiny runs the same code on a CPU.")
    if args.kernels is not None:
        read_kernels(args.kernels, args.read_kernels)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    signal.signal(signal.SIGALRM, _time_up)
    results = errors = 0
    for part in args.part:
        allowed = minutes[part] if args.minutes is None else args.minutes
        day = Day(part, args.output, minutes=allowed, sizes=TINY if args.tiny else FULL)
        parts[part](day, **{name: getattr(args, name) for name in choices or {}})
        if args.kernels is not None:
            save_kernels(args.kernels, args.output)
        results, errors = results + day.results, errors + day.errors
    if not results:
        sys.exit("nothing was measured: no row has a result, or fits into its --minutes.")
    sys.exit(1 if errors else 0)
