"""Console tables: the form that they share, and those that compare the start and the end of a training run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from gym_rm.reports.runs import Run
from gym_rm.reports.transcripts import cut

MOST_CHARACTERS = 240  # maximum per table cell; a longer text is cut in the middle


def results_table(run: Run) -> Table:
    """Return a table of the first and the last measurement on held-out prompts.

    For a run with fewer than two measurements, it compares the first and the last tenth of the training steps.
    """
    if len(run.held_out) > 1:
        before, after = dict(run.held_out[0]), dict(run.held_out[-1])
        title = "Held-out prompts, before and after training"
    else:
        width = max(1, len(run.training) // 10)
        before, after = _mean(run.training[:width]), _mean(run.training[-width:])
        title = "Training prompts, first and last steps"
    table = Table("", title=title, title_justify="left", caption_justify="left", caption=run.caption)
    table.add_column("before", justify="right")
    table.add_column("after", justify="right", style="bold")
    for name, label in (
        ("accuracy", "right answers, checked without the reward model"),
        ("reward_mean", "reward"),
        ("completion_tokens", "tokens of a reply"),
        ("thinking_tokens", "tokens of its thinking"),
        ("answer_tokens", "tokens of its answer"),
        ("steps_per_reply", "steps of a reply"),
        ("tool_calls", "tool calls of an episode"),
        ("tool_errors", "calls that failed"),
    ):
        if before.get(name) is not None and after.get(name) is not None:
            table.add_row(label, *_format(name, (before[name], after[name])))
    return table


def conversations_table(run: Run, *, limit: int = 6) -> Table:
    """Return a table of the first `limit` held-out prompts with their replies before and after training."""
    table = Table(title="The same prompts, before and after training", title_justify="left", show_lines=True)
    table.add_column("user", ratio=2)
    table.add_column("before", ratio=1)
    table.add_column("after", ratio=1)
    for before, after in run.before_and_after()[:limit]:
        prompt = "\n".join(message["content"] for message in before["messages"][:-1])
        table.add_row(Text(_short(prompt)), _reply(before), _reply(after))
    return table


def plain_table(title: str | Text, *columns: str, numbers: Sequence[str] = ()) -> Table:
    """Return a table without lines between its rows; columns fold long texts, `numbers` are those on the right."""
    table = Table(title=title, title_justify="left", caption_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.pad_edge = False
    for name in columns:
        table.add_column(
            Text(name), overflow="fold", no_wrap=name in numbers, justify="right" if name in numbers else "left"
        )
    return table


def signed(value: float, *, like: Sequence[float] = ()) -> str:
    """Format a reward with its sign; the largest number of `value` and `like` gets three significant digits.

    Example:
        >>> signed(3.4159), signed(-0.001234), signed(-0.004, like=[3.4])
        ('+3.42', '-0.00123', '0.00')
    """
    if not math.isfinite(value):  # an end of an interval of one row
        return f"{value:+}"
    largest = max(abs(each) for each in (value, *like) if math.isfinite(each))
    decimals = 2 if largest == 0 else min(12, max(0, 2 - math.floor(math.log10(largest))))
    text = f"{value:+.{decimals}f}"
    return text if any(digit in text for digit in "123456789") else text[1:]


# --- helpers -----------------------------------------------------------------------------------------------------


def _format(name: str, values: Sequence[float]) -> list[str]:
    if name == "reward_mean":
        return [signed(value, like=values) for value in values]
    return [f"{value:.1%}" if name in ("accuracy", "tool_errors") else f"{value:.1f}" for value in values]


def _mean(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = {name for row in rows for name, value in row.items() if isinstance(value, int | float)}
    columns = {name: [row[name] for row in rows if isinstance(row.get(name), int | float)] for name in names}
    return {name: sum(values) / len(values) for name, values in columns.items()}


def _reply(row: Mapping[str, Any]) -> Text:
    mark, style = {True: ("✓ ", "green"), False: ("✗ ", "red"), None: ("", "")}[row.get("right")]
    said = _short(row["messages"][-1]["content"]) or "(nothing)"
    reward = "no reward" if row["reward"] is None else signed(row["reward"])
    return Text(mark + said, style=style).append(f"  {reward}", "dim")


def _short(text: str) -> str:
    return cut("\n".join(line for line in text.splitlines() if line.strip()), MOST_CHARACTERS)
