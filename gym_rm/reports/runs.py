"""The folder of a run: written line by line while it trains, read back as tables and a picture.

`settings.yaml`, `metrics.jsonl` (one line a training step, `"phase": "train"`, and one a measurement on held-out
prompts, `"phase": "held_out"`), `conversations.jsonl` (what was said to the held-out prompts, at which step).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.table import Table
from rich.text import Text

from gym_rm.data.rows import read_rows
from gym_rm.errors import ConfigError
from gym_rm.types import Conversation

METRICS, CONVERSATIONS, SETTINGS = "metrics.jsonl", "conversations.jsonl", "settings.yaml"
REWARD_COLOR, ACCURACY_COLOR, FAINT = "#2f6fb7", "#1f8a4c", "#8a939c"


class RunWriter:
    """Writes the folder of a run; every line is on disk when the call returns.

    Args:
        folder: where; it is made if it is not there.
        settings: plain values, written once as YAML.

    Raises:
        ConfigError: the folder holds a run already.

    Example:
        >>> import tempfile
        >>> run = RunWriter(tempfile.mkdtemp(), {"seed": 1})
        >>> run.add_metrics("train", 1, {"reward_mean": 0.5})
        >>> read_run(run.folder).training[0]["reward_mean"]
        0.5
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        if (self.folder / METRICS).exists():
            raise ConfigError(f"{str(self.folder)!r} holds a run already; name another folder or remove it.")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / SETTINGS).write_text(yaml.safe_dump(dict(settings), sort_keys=False), encoding="utf-8")
        self._started = time.perf_counter()

    def add_metrics(self, phase: Literal["train", "held_out"], step: int, values: Mapping[str, Any]) -> None:
        """One line of `metrics.jsonl`, with the seconds since the writer was made."""
        seconds = round(time.perf_counter() - self._started, 3)
        self._append(METRICS, {"phase": phase, "step": step, "seconds": seconds, **values})

    def add_conversation(
        self, step: int, conversation: Conversation, *, prompt_id: str, reward: float, right: bool | None = None
    ) -> None:
        """One line of `conversations.jsonl`."""
        row = {"step": step, "prompt_id": prompt_id, "reward": reward, "right": right, "messages": list(conversation)}
        self._append(CONVERSATIONS, row)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")


@dataclass(frozen=True, slots=True)
class Run:
    """What `RunWriter` wrote.

    Attributes:
        folder: where it was read from.
        settings: of the run.
        training: rows of the training steps, in order.
        held_out: rows of the measurements on held-out prompts, in order.
        conversations: rows of the conversations with held-out prompts, in order.
    """

    folder: Path
    settings: Mapping[str, Any]
    training: tuple[Mapping[str, Any], ...]
    held_out: tuple[Mapping[str, Any], ...]
    conversations: tuple[Mapping[str, Any], ...]


def read_run(folder: str | Path) -> Run:
    """Read the folder of a run, finished or not.

    Raises:
        ConfigError: no such folder, or one without a run.
    """
    folder = Path(folder)
    if not (folder / METRICS).is_file():
        raise ConfigError(f"{str(folder)!r} holds no run: there is no {METRICS} in it.")
    rows = [row for _, row in read_rows(folder / METRICS)]
    settings = yaml.safe_load((folder / SETTINGS).read_text(encoding="utf-8")) if (folder / SETTINGS).exists() else {}
    has_conversations = (folder / CONVERSATIONS).exists()
    return Run(
        folder,
        settings,
        tuple(row for row in rows if row["phase"] == "train"),
        tuple(row for row in rows if row["phase"] == "held_out"),
        tuple(row for _, row in read_rows(folder / CONVERSATIONS)) if has_conversations else (),
    )


def results_table(run: Run) -> Table:
    """Before and after, side by side: the first and the last measurement on held-out prompts.

    A run that was not measured twice compares its first training steps with its last, a tenth of them each.
    """
    if len(run.held_out) > 1:
        before, after = dict(run.held_out[0]), dict(run.held_out[-1])
        title = "Held-out prompts, before and after training"
    else:
        width = max(1, len(run.training) // 10)
        before, after = _mean(run.training[:width]), _mean(run.training[-width:])
        title = "Training prompts, first and last steps"
    table = Table(title=title, title_justify="left", caption_justify="left", caption=_caption(run))
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right", style="bold")
    for name, label, form in (
        ("accuracy", "right answers, checked without the reward model", "{:.1%}"),
        ("reward_mean", "reward", "{:+.2f}"),
        ("completion_tokens", "tokens of a reply", "{:.1f}"),
    ):
        if before.get(name) is not None and after.get(name) is not None:
            table.add_row(label, form.format(before[name]), form.format(after[name]))
    return table


def conversations_table(run: Run, *, limit: int = 6) -> Table:
    """The first `limit` held-out prompts with the replies to them before and after training."""
    table = Table(title="The same prompts, before and after training", title_justify="left", show_lines=True)
    table.add_column("user", ratio=2)
    table.add_column("before", ratio=1)
    table.add_column("after", ratio=1)
    for before, after in _before_and_after(run, limit):
        prompt = "\n".join(message["content"] for message in before["messages"][:-1])
        table.add_row(Text(prompt), _reply(before), _reply(after))
    return table


def plot_run(run: Run, path: str | Path) -> Path:
    """Draw reward and accuracy over the steps into a PNG (or what the suffix says); returns the path.

    Lines are training steps (faint) and their running mean, dots the measurements on held-out prompts.

    Raises:
        ConfigError: a run without any step.
    """
    if not run.training:
        raise ConfigError(f"{str(run.folder)!r}: no training step has been recorded, there is nothing to draw.")
    from matplotlib.figure import Figure

    panels = [("reward_mean", "Reward", REWARD_COLOR)]
    if any(row.get("accuracy") is not None for row in run.training):
        panels.append(("accuracy", "Right answers, checked without the reward model", ACCURACY_COLOR))
    figure = Figure(figsize=(5.2 * len(panels), 3.7), dpi=150, layout="constrained")
    for position, (name, label, color) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), position)
        _draw(axes, run, name, color)
        axes.set_title(label, loc="left", fontsize=11, weight="bold", pad=10)
    figure.supxlabel(_caption(run), fontsize=8, color=FAINT, x=0.995, ha="right")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


# --- parts -------------------------------------------------------------------------------------------------------


def _draw(axes: Any, run: Run, name: str, color: str) -> None:
    steps = [row["step"] for row in run.training if row.get(name) is not None]
    values = [row[name] for row in run.training if row.get(name) is not None]
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
    axes.plot(steps, _smooth(values), color=color, linewidth=2, label="training prompts")
    measured = [(row["step"], row[name]) for row in run.held_out if row.get(name) is not None]
    if measured:
        axes.plot(
            *zip(*measured, strict=True), "o", color=color, markersize=7, mec="white", mew=1.2, label="held-out prompts"
        )
        form = "{:.0%}" if name == "accuracy" else "{:+.1f}"
        # The first value under its dot, the last beside it, in a margin of its own: neither covers a line.
        for (step, value), offset in ((measured[0], (6, -13)), (measured[-1], (8, -4))):
            axes.annotate(
                form.format(value), (step, value), offset, textcoords="offset points", color=color, weight="bold"
            )
        axes.margins(x=0.13, y=0.12)
    if name == "accuracy":
        axes.set_ylim(0, 1.04)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("training step", fontsize=9)
    axes.tick_params(labelsize=9, color=FAINT)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=FAINT, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.legend(frameon=False, fontsize=9, loc="lower right")


def _smooth(values: Sequence[float], *, width: int = 5) -> list[float]:
    """The mean of each value and up to `width - 1` before it."""
    windows = [values[max(0, end - width) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def _caption(run: Run) -> str:
    if not run.training:
        return "no training step"
    settings = run.settings
    parts = [f"{run.training[-1]['step']} steps in {run.training[-1]['seconds']:.0f} s"]
    parts += [f"seed {settings['seed']}"] if "seed" in settings else []
    for group, name, what in (("policy", "model", "policy"), ("env", "reward_model", "reward model")):
        if isinstance(settings.get(group), Mapping):
            parts.append(f"{what} {settings[group].get(name) or 'embedded'}")
    return ", ".join(parts)


def _mean(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = {name for row in rows for name, value in row.items() if isinstance(value, int | float)}
    columns = {name: [row[name] for row in rows if isinstance(row.get(name), int | float)] for name in names}
    return {name: sum(values) / len(values) for name, values in columns.items()}


def _before_and_after(run: Run, limit: int) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Rows of the first and the last measurement that answer the same prompt, each prompt once."""
    if not run.conversations:
        return
    first, last = run.conversations[0]["step"], run.conversations[-1]["step"]
    before, after = ([row for row in run.conversations if row["step"] == step] for step in (first, last))
    seen: set[str] = set()
    for one, other in zip(before, after, strict=False):
        if one["prompt_id"] == other["prompt_id"] and one["prompt_id"] not in seen and len(seen) < limit:
            seen.add(one["prompt_id"])
            yield one, other


def _reply(row: Mapping[str, Any]) -> Text:
    mark, style = {True: ("✓ ", "green"), False: ("✗ ", "red"), None: ("", "")}[row.get("right")]
    said = row["messages"][-1]["content"] or "(nothing)"
    return Text(mark + said, style=style).append(f"  {row['reward']:+.1f}", "dim")
