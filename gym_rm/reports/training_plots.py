"""Plot of a training run of a reward model: loss and accuracy, in training and on the validation sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_rm.errors import ConfigError
from gym_rm.reports.curves import read_curve
from gym_rm.reports.plots import FAINT, smooth

COLORS = ("#1f8a4c", "#b3541e", "#6b4fa0", "#0f7c8a")
TITLES = {"loss": "Loss", "accuracy": "Accuracy", "step_accuracy": "Accuracy of steps"}


def plot_training(folder: str | Path, path: str | Path) -> Path:
    """Plot the curves of a run to a file in the format of its suffix; return the path.

    The faint line shows the training steps, the thick one their running mean, dots the validation sets.

    Args:
        folder: folder of the run, with `metrics.csv`.
        path: the picture.

    Raises:
        ConfigError: the run has no training step.
    """
    from matplotlib.figure import Figure

    folder, path = Path(folder), Path(path)
    steps = read_curve(folder / "metrics.csv") if (folder / "metrics.csv").exists() else []
    if not steps:
        raise ConfigError(f"run {str(folder)!r} has no training step to plot; expected at least one.")
    measured = read_curve(folder / "validation.csv") if (folder / "validation.csv").exists() else []
    whole_sets = [row for row in measured if not row["source"]]
    names = [name for name in TITLES if steps[0].get(name)]
    figure = Figure(figsize=(5.2 * len(names), 3.6), dpi=150, layout="constrained")
    for position, name in enumerate(names, start=1):
        axes = figure.add_subplot(1, len(names), position)
        axes.set_title(TITLES[name], loc="left", fontsize=11, weight="bold", pad=24)
        _draw(axes, name, steps, whole_sets)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _draw(axes: Any, name: str, steps: list[dict[str, str]], measured: list[dict[str, str]]) -> None:
    trained = [(int(row["step"]), float(row[name])) for row in steps if row.get(name)]
    numbers, values = zip(*trained, strict=True)
    axes.plot(numbers, values, color="#2f6fb7", alpha=0.25, linewidth=1)
    axes.plot(numbers, smooth(values), color="#2f6fb7", linewidth=2, label="training")
    for index, set_name in enumerate(dict.fromkeys(row["set"] for row in measured)):
        points = [(int(row["step"]), float(row[name])) for row in measured if row["set"] == set_name and row.get(name)]
        if points:
            color = COLORS[index % len(COLORS)]
            label = f"{set_name}: {points[-1][1]:.3g}"
            axes.plot(*zip(*points, strict=True), "o", color=color, mec="white", clip_on=False, zorder=3, label=label)
    axes.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.1)
    axes.set_xlim(left=0)
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(labelsize=9, color=FAINT)
    axes.grid(axis="y", color=FAINT, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
