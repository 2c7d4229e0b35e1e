"""Tables of a training run for the console: what changed between its start and its end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from gym_rm.envs.transcripts import visible
from gym_rm.reports.runs import Run

MOST_CHARACTERS = 240  # of one cell; longer texts lose their middle


def results_table(run: Run) -> Table:
    """Before and after, side by side: the first and the last measurement on held-out prompts.

    A run with fewer than two measurements compares its first training steps with its last, a tenth of them each.
    """
    if len(run.held_out) > 1:
        before, after = dict(run.held_out[0]), dict(run.held_out[-1])
        title = "Held-out prompts, before and after training"
    else:
        width = max(1, len(run.training) // 10)
        before, after = _mean(run.training[:width]), _mean(run.training[-width:])
        title = "Training prompts, first and last steps"
    table = Table(title=title, title_justify="left", caption_justify="left", caption=run.caption)
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right", style="bold")
    for name, label in (
        ("accuracy", "right answers, checked without the reward model"),
        ("reward_mean", "reward"),
        ("completion_tokens", "tokens of a reply"),
    ):
        if before.get(name) is not None and after.get(name) is not None:
            table.add_row(label, *_format(name, (before[name], after[name])))
    if opening := common_opening(run):
        table.add_row(f"replies that begin with {opening.words!r}", f"{opening.before:.0%}", f"{opening.after:.0%}")
    return table


def conversations_table(run: Run, *, limit: int = 6) -> Table:
    """The first `limit` held-out prompts with the replies to them before and after training."""
    table = Table(title="The same prompts, before and after training", title_justify="left", show_lines=True)
    table.add_column("user", ratio=2)
    table.add_column("before", ratio=1)
    table.add_column("after", ratio=1)
    for before, after in run.before_and_after()[:limit]:
        prompt = "\n".join(message["content"] for message in before["messages"][:-1])
        table.add_row(Text(_cut(prompt)), _reply(before), _reply(after))
    return table


@dataclass(frozen=True, slots=True)
class Opening:
    """The two words that most replies begin with after training.

    Attributes:
        words: the two words.
        before: share of the replies that began with them before training.
        after: share of the replies that begin with them now.
    """

    words: str
    before: float
    after: float

    @property
    def warning(self) -> str | None:
        """What to tell the user where the policy settled on one wording, a sign of reward hacking; else None."""
        if self.after - self.before < 0.5:
            return None
        return (
            f"Reward hacking? {self.after:.0%} of the replies now begin with {self.words!r}, {self.before:.0%} did "
            "before training. The policy may have found a wording that the reward model overrates: read some replies."
        )


def common_opening(run: Run) -> Opening | None:
    """The most common opening after training; None for a run that was not measured twice."""
    pairs = run.before_and_after()
    if not pairs:
        return None
    before, after = (Counter(_first_words(row) for row in rows) for rows in zip(*pairs, strict=True))
    words, count = after.most_common(1)[0]
    return Opening(words, before[words] / len(pairs), count / len(pairs))


def signed(value: float, *, like: Sequence[float] = ()) -> str:
    """A reward with its sign and three digits; as many decimals as the largest of `like` and itself needs.

    Example:
        >>> signed(3.4159), signed(-0.001234), signed(-0.004, like=[3.4])
        ('+3.42', '-0.00123', '0.00')
    """
    largest = max(abs(each) for each in (value, *like))
    decimals = 2 if largest == 0 else min(12, max(0, 2 - math.floor(math.log10(largest))))
    text = f"{value:+.{decimals}f}"
    return text if any(digit in text for digit in "123456789") else text[1:]


# --- parts -------------------------------------------------------------------------------------------------------


def _format(name: str, values: Sequence[float]) -> list[str]:
    if name == "reward_mean":
        return [signed(value, like=values) for value in values]
    return [f"{value:.1%}" if name == "accuracy" else f"{value:.1f}" for value in values]


def _mean(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = {name for row in rows for name, value in row.items() if isinstance(value, int | float)}
    columns = {name: [row[name] for row in rows if isinstance(row.get(name), int | float)] for name in names}
    return {name: sum(values) / len(values) for name, values in columns.items()}


def _first_words(row: Mapping[str, Any]) -> str:
    return " ".join(row["messages"][-1]["content"].split()[:2])[:40] or "(nothing)"


def _reply(row: Mapping[str, Any]) -> Text:
    mark, style = {True: ("✓ ", "green"), False: ("✗ ", "red"), None: ("", "")}[row.get("right")]
    said = _cut(row["messages"][-1]["content"]) or "(nothing)"
    return Text(mark + said, style=style).append(f"  {signed(row['reward'])}", "dim")


def _cut(text: str) -> str:
    """A text for one cell: control characters spelled out, the middle of a long one left out."""
    text = visible("\n".join(line for line in text.splitlines() if line.strip()))
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half].rstrip()} […] {text[-half:].lstrip()}"
