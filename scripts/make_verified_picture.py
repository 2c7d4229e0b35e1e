"""Draw docs/images/verified-runs.png from the folders of the runs of configs/grpo/{math,code,mixture}.yaml.

python scripts/make_verified_picture.py outputs/math outputs/code outputs/mixture
"""

import sys
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))

from gym_rm.reports.curves import read_curve

REWARD_COLOR, ACCURACY_COLOR, FAINT = "#2f6fb7", "#1f8a4c", "#8a939c"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "verified-runs.png"
TITLES = ("Math-v0: the right number", "Code-v0: functions that pass", "Mixed-v0: three components, GDPO")
RIGHT = ("verdict/right", "verdict/passed", "correctness/verdict/right")
REWARD = "component/style"


def draw(folders: list[Path]) -> None:
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axes, folder, title, right in zip(figure.subplots(1, 3), folders, TITLES, RIGHT, strict=True):
        rows = read_curve(folder / "metrics.csv")
        steps = [int(row["step"]) for row in rows]
        axes.plot(steps, [100 * float(row.get(right) or 0) for row in rows], color=ACCURACY_COLOR)
        axes.set(title=title, xlabel="step", ylabel="right (%)", ylim=(0, 100))
        axes.grid(color=FAINT, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if REWARD in rows[0]:
            axes.set_ylabel("right (%)", color=ACCURACY_COLOR)
            other = axes.twinx()
            other.plot(steps, [float(row[REWARD]) for row in rows], color=REWARD_COLOR)
            other.set_ylabel("reward model behind its gate", color=REWARD_COLOR)
            other.spines["top"].set_visible(False)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    draw([Path(each) for each in sys.argv[1:4]])
