"""Compare what the planner estimates with what is measured on this machine, or published by others.

    python benchmarks/planner.py memory [--quick]   # peak memory of scoring, training and GRPO, each in its own process
    python benchmarks/planner.py memory --work scoring --model FOLDER --tokens 4096   # a run of your own
    python benchmarks/planner.py throughput
    python benchmarks/planner.py aiconfigurator

Each has options of its own: `python benchmarks/planner.py memory -h`.
"""

from __future__ import annotations

import importlib
import sys

COMMANDS = ("memory", "throughput", "aiconfigurator")


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(__doc__)
    importlib.import_module(f"planner_{sys.argv[1]}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
