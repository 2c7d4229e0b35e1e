"""Plots of runs as files: curves over the training steps, with the measurements on held-out data as dots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_rm.errors import ConfigError
from gym_rm.reports.curves import read_curve
from gym_rm.reports.monitor import signs
from gym_rm.reports.runs import Run
from gym_rm.reports.tables import signed

REWARD_COLOR, ACCURACY_COLOR, FAINT = "#2f6fb7", "#1f8a4c", "#8a939c"
COLORS = (ACCURACY_COLOR, "#b3541e", "#6b4fa0", "#0f7c8a")  # of validation sets

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: heading.
        color: of the line.
        line: values of the training steps; drawn faint, with their running mean.
        words: words of the line in the legend.
        dots: measurements by their words in the legend, with a colour.
        share: whether the values are shares from 0 to 1.
    """

    title: str
    color: str
    line: Points
    words: str
    dots: Mapping[str, tuple[str, Points]]
    share: bool = False


def plot_run(run: Run, path: str | Path) -> Path:
    """Plot reward and accuracy of a GRPO run to a file in the format of its suffix; return the path.

    Raises:
        ConfigError: the run has no training step.
    """
    if not run.training:
        raise ConfigError(f"run {str(run.folder)!r} has no training step to plot; expected at least one.")
    panels = [_of_run(run, "reward_mean", "Reward", REWARD_COLOR)]
    if any(row.get("accuracy") is not None for row in run.training):
        panels.append(_of_run(run, "accuracy", "Right answers, checked without the reward model", ACCURACY_COLOR))
    notes = [f"{sign.message} {sign.what_to_turn}" for sign in signs(run)] + [run.caption]
    return plot(panels, path, caption="\n".join(notes))


def plot_training(folder: str | Path, path: str | Path) -> Path:
    """Plot loss and accuracy of a reward model's training to a file in the format of its suffix; return the path.

    Args:
        folder: folder of the run, with `metrics.csv`.
        path: the picture.

    Raises:
        ConfigError: the run has no training step.
    """
    folder = Path(folder)
    steps = read_curve(folder / "metrics.csv") if (folder / "metrics.csv").exists() else []
    if not steps:
        raise ConfigError(f"run {str(folder)!r} has no training step to plot; expected at least one.")
    measured = read_curve(folder / "validation.csv") if (folder / "validation.csv").exists() else []
    panels = []
    for name, title in (("loss", "Loss"), ("accuracy", "Accuracy"), ("step_accuracy", "Accuracy of steps")):
        if not steps[0].get(name):
            continue
        dots = {}
        for index, set_name in enumerate(dict.fromkeys(row["set"] for row in measured)):
            points = _numbers([row for row in measured if row["set"] == set_name], name)
            if points:
                dots[f"{set_name}: {points[-1][1]:.3g}"] = (COLORS[index % len(COLORS)], points)
        panels.append(Panel(title, REWARD_COLOR, _numbers(steps, name), "training", dots))
    return plot(panels, path)


def plot(panels: Sequence[Panel], path: str | Path, *, caption: str = "") -> Path:
    """Draw panels beside each other, with the numbers and the legend above the axes; return the path."""
    from matplotlib.figure import Figure  # imported here because the import is slow

    figure = Figure(figsize=(5.2 * len(panels), 3.9), dpi=150, layout="constrained")
    for position, panel in enumerate(panels, start=1):
        _draw(figure.add_subplot(1, len(panels), position), panel)
    if caption:
        figure.supxlabel(caption, fontsize=8, color=FAINT, x=0.995, ha="right", multialignment="right", wrap=True)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _of_run(run: Run, name: str, title: str, color: str) -> Panel:
    measured = _numbers(run.held_out, name)
    words = "held-out prompts"
    if len(measured) > 1:
        first, last = measured[0][1], measured[-1][1]
        both = [f"{value:.0%}" if name == "accuracy" else signed(value, like=[first, last]) for value in (first, last)]
        words += f": {both[0]} to {both[1]}"
    dots = {words: (color, measured)} if measured else {}
    return Panel(title, color, _numbers(run.training, name), "training prompts", dots, share=name == "accuracy")


def _numbers(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(float(row["step"]), float(row[name])) for row in rows if row.get(name) not in (None, "")]


def _draw(axes: Any, panel: Panel) -> None:
    axes.set_title(panel.title, loc="left", fontsize=11, weight="bold", pad=26)
    steps, values = [step for step, _ in panel.line], [value for _, value in panel.line]
    axes.plot(steps, values, color=panel.color, alpha=0.25, linewidth=1)
    axes.plot(steps, smooth(values), color=panel.color, linewidth=2, label=panel.words)
    for words, (color, points) in panel.dots.items():
        style = {"color": color, "markersize": 7, "mec": "white", "mew": 1.2, "clip_on": False, "zorder": 3}
        axes.plot(*zip(*points, strict=True), "o", label=words, **style)
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.1, "borderpad": 0}
    axes.legend(frameon=False, fontsize=9, ncols=3, handlelength=1.4, columnspacing=1.2, **place)
    if panel.share:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
    axes.set_xlim(left=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("training step", fontsize=9)
    axes.tick_params(labelsize=9, color=FAINT)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=FAINT, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)


def smooth(values: Sequence[float], *, width: int = 5) -> list[float]:
    """Return the mean of each value and up to `width - 1` values before it."""
    windows = [values[max(0, end - width) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]
