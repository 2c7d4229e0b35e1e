"""Compare what the planner estimates with what is measured on this machine.

python benchmarks/planner.py memory [--quick]   # peak memory of scoring, training and GRPO, each in its own process
python benchmarks/planner.py memory --work scoring --model FOLDER --tokens 4096   # a run of your own
"""

from __future__ import annotations

import argparse

import planner_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    planner_memory.add_parser(commands)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
