"""Compare what the planner estimates with what is measured on this machine.

python benchmarks/planner.py memory [--quick]   # peak memory of scoring, training and GRPO, each in its own process
python benchmarks/planner.py memory --work scoring --model FOLDER --tokens 4096   # a run of your own
python benchmarks/planner.py throughput      # times of scoring, training and generation, after calibration
python benchmarks/planner.py aiconfigurator  # times beside those of NVIDIA AIConfigurator
"""

from __future__ import annotations

import argparse

import planner_aiconfigurator
import planner_memory
import planner_throughput


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    planner_memory.add_parser(commands)
    planner_throughput.add_parser(commands)
    planner_aiconfigurator.add_parser(commands)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
