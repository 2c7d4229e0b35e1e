"""Check the replies of runs of `agents/grpo.py` on the embedded models without a model.

    python scripts/check_demo.py outputs/grpo-*

Prints for the first and the last measurement of each run the share of right answers, the share of proper replies
(exactly one of the four sentences of the task, whatever the number) and the mean reward, then the most common replies
after training.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gym_rm.reports.runs import Run, read_run
from scripts.three_numbers import is_proper


def reply(row: Mapping[str, Any]) -> str:
    return row["messages"][-1]["content"]


def shares(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Return the share of right replies, the share of proper replies and the mean reward."""
    return tuple(
        sum(values) / len(rows)
        for values in (
            [bool(row["right"]) for row in rows],
            [is_proper(reply(row)) for row in rows],
            [math.nan if row["reward"] is None else row["reward"] for row in rows],
        )
    )


def check(run: Run) -> tuple[tuple[float, float, float], tuple[float, float, float], Counter]:
    """Return the shares before and after training, and how often each reply occurs after it, numbers left out."""
    before, after = zip(*run.before_and_after(), strict=True)
    return shares(before), shares(after), Counter(re.sub(r"\d+", "N", reply(row)) for row in after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    print("| run | seed | right | proper | reward | training |")
    print("| --- | --- | --- | --- | --- | --- |")
    for folder in parser.parse_args().runs:
        run = read_run(folder)
        before, after, replies = check(run)
        seconds = sum(value for row in run.training for name, value in row.items() if name.startswith("phase_seconds/"))
        right, proper = (f"{before[i]:.1%} to {after[i]:.1%}" for i in (0, 1))
        reward = f"{before[2]:+.2f} to {after[2]:+.2f}"
        print(f"| {folder.name} | {run.settings['seed']} | {right} | {proper} | {reward} | {seconds:.0f} s |")
        print("|   ", ", ".join(f"{count} x {text!r}" for text, count in replies.most_common(6)))


if __name__ == "__main__":
    main()
