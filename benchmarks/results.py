"""Write the numbers of a benchmark to benchmarks/results, from where scripts/write_figures.py puts them on pages."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
PEERS = ("trl", "sentence_transformers", "stable_baselines3")


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--save`, the name of the result."""
    parser.add_argument("--save", metavar="NAME", help="write the numbers to benchmarks/results/NAME.json")


def save(
    name: str | None,
    values: Mapping[str, Any],
    *,
    kind: str = "measured",
    peers: Sequence[str] = (),
    versions: Mapping[str, str] | None = None,
) -> None:
    """Write the numbers of this process.

    Args:
        name: name of the file; None to write nothing.
        values: numbers, or mappings of names to numbers or further mappings. Names have no slash.
        kind: `measured`, or `computed` for what would be the same on every machine.
        peers: packages to name besides. Those of `PEERS` that this process has imported are named anyway.
        versions: of what ran in other processes, by name.
    """
    if name is None:
        return
    packages = [
        "gym_rm",
        "torch",
        "transformers",
        *(each for each in PEERS if each in sys.modules and each not in peers),
        *peers,
    ]
    result = {
        "command": command(),
        "kind": kind,
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "versions": {"Python": platform.python_version()}
        | {each: _version(each) for each in packages}
        | {**(versions or {})},
        "values": plain(values),
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def command() -> str:
    """Return the command of this process, as a user types it in the checkout."""
    script = Path(sys.argv[0]).resolve().relative_to(Path(__file__).resolve().parents[1])
    return shlex.join(["python", str(script), *sys.argv[1:]])


def hardware() -> dict[str, Any]:
    """Return the CPU, and the GPU if there is one."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found = {"CPU": models[0] if models else platform.processor(), "cores": os.cpu_count()}
    torch: Any = sys.modules.get("torch")  # not imported for its version: it would take most of a process's memory
    found["threads"] = torch.get_num_threads() if torch else 1
    return found | ({"GPU": torch.cuda.get_device_name()} if torch and torch.cuda.is_available() else {})


def plain(value: Any) -> Any:
    """Return plain numbers and mappings; numbers that are not finite are left out."""
    if isinstance(value, Mapping):
        found = {str(name): plain(each) for name, each in value.items()}
        if wrong := [name for name in found if "/" in name]:
            raise ValueError(f"names of values must have no slash, got {wrong}.")
        return {name: each for name, each in found.items() if each == each}
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, (int, float)):
        raise TypeError(f"values must be numbers or mappings, got {value!r}.")
    return number


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of this checkout"
