"""Draw docs/images/tool-runs.png from two runs of configs/grpo/tool.yaml, with and without the calculator.

python scripts/make_tool_picture.py outputs/with outputs/without
"""

import sys
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))

from gym_rm.reports.curves import read_curve

COLORS, FAINT = ("#1f8a4c", "#2f6fb7"), "#8a939c"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "tool-runs.png"


def draw(folders: list[Path]) -> None:
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    right, calls = figure.subplots(1, 2)
    for folder, label, color in zip(folders, ("with the calculator", "without"), COLORS, strict=True):
        rows = read_curve(folder / "held_out.csv")
        steps = [int(row["step"]) for row in rows]
        right.plot(steps, [100 * float(row["accuracy"]) for row in rows], color=color, label=label, marker="o", ms=3)
    rows = read_curve(folders[0] / "metrics.csv")
    calls.plot([int(row["step"]) for row in rows], [float(row["tool_calls"]) for row in rows], color=COLORS[0])
    right.set(xlabel="step", ylabel="held-out prompts right (%)", ylim=(0, 100))
    right.legend(frameon=False)
    calls.set(xlabel="step", ylabel="calls of an episode", ylim=(0, 1.2))
    for axes in (right, calls):
        axes.grid(color=FAINT, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    draw([Path(each) for each in sys.argv[1:3]])
