"""Plots of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gym_rm.errors import ConfigError
from gym_rm.reports.monitor import signs
from gym_rm.reports.runs import Run
from gym_rm.reports.tables import signed

REWARD_COLOR, ACCURACY_COLOR, FAINT = "#2f6fb7", "#1f8a4c", "#8a939c"


def plot_run(run: Run, path: str | Path) -> Path:
    """Plot reward and accuracy over the training steps to a file in the format of its suffix; return the path.

    Lines show the training steps (faint) and their running mean. Dots show the measurements on held-out prompts. The
    numbers and the legend are above the axes, so that they do not cover the curves.

    Raises:
        ConfigError: the run has no training step.
    """
    if not run.training:
        raise ConfigError(f"run {str(run.folder)!r} has no training step to plot; expected at least one.")
    from matplotlib.figure import Figure

    panels = [("reward_mean", "Reward", REWARD_COLOR)]
    if any(row.get("accuracy") is not None for row in run.training):
        panels.append(("accuracy", "Right answers, checked without the reward model", ACCURACY_COLOR))
    figure = Figure(figsize=(5.2 * len(panels), 3.9), dpi=150, layout="constrained")
    for position, (name, title, color) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), position)
        _draw(axes, run, name, color)
        axes.set_title(title, loc="left", fontsize=11, weight="bold", pad=26)
    notes = [f"{sign.message} {sign.what_to_turn}" for sign in signs(run)] + [run.caption]
    figure.supxlabel("\n".join(notes), fontsize=8, color=FAINT, x=0.995, ha="right", multialignment="right", wrap=True)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _draw(axes: Any, run: Run, name: str, color: str) -> None:
    trained = [(row["step"], row[name]) for row in run.training if row.get(name) is not None]
    measured = [(row["step"], row[name]) for row in run.held_out if row.get(name) is not None]
    steps, values = [step for step, _ in trained], [value for _, value in trained]
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
    axes.plot(steps, smooth(values), color=color, linewidth=2, label="training prompts")
    if measured:
        first, last = measured[0][1], measured[-1][1]
        change = f"{_label(name, first, last)} to {_label(name, last, first)}" if len(measured) > 1 else ""
        label = f"held-out prompts: {change}" if change else "held-out prompts"
        dots = {"color": color, "markersize": 7, "mec": "white", "mew": 1.2, "clip_on": False, "zorder": 3}
        axes.plot(*zip(*measured, strict=True), "o", label=label, **dots)
    axes.legend(
        frameon=False,
        fontsize=9,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.1,
        ncols=2,
        handlelength=1.4,
        columnspacing=1.2,
        borderpad=0,
    )
    if name == "accuracy":
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


def _label(name: str, value: float, other: float) -> str:
    return f"{value:.0%}" if name == "accuracy" else signed(value, like=[other])


def smooth(values: Sequence[float], *, width: int = 5) -> list[float]:
    """Return the mean of each value and up to `width - 1` values before it."""
    windows = [values[max(0, end - width) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]
