"""Charts of the page of a run: curves over the steps, and reward against length.

Words are in legends and captions beside the drawings, so that no label sits on a curve. A chart without values is left
out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gym_rm.reports.metrics import correlation
from gym_rm.reports.runs import Run
from gym_rm.reports.svg import Chart, Point, round_values

MOST_POINTS = 300  # of a line; more steps are averaged
MOST_DOTS = 1000
COLORS = 6
HEIGHT, BOTTOM = 252, 40
COMPONENTS = "component/"
VERDICT = re.compile(r"(^|/)verdict/")

Series = Sequence[tuple[str, str]]  # names of metrics with their words


@dataclass(frozen=True, slots=True)
class CaptionedChart:
    """A drawing with its heading, its caption (`words`), and a legend: words of the lines by their class."""

    title: str
    svg: str
    words: str
    legend: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """What a chart of curves shows.

    Attributes:
        series: metrics with their words.
        words: caption.
        kind: "share" from 0 to 100 %, "part" from 0 in percent, "positive" from 0, or "number".
        measured: whether the measurements on held-out rows have the first metric, too.
    """

    title: str
    series: Series
    words: str
    kind: str = "positive"
    measured: bool = False


OF_POLICIES = (
    Panel("Reward", (("reward_mean", "training prompts, mean"),), "", "number", measured=True),
    Panel(
        "Right answers",
        (("accuracy", "training prompts"),),
        "Checked without the reward model.",
        "share",
        measured=True,
    ),
    Panel(
        "Divergence from the start policy",
        (("kl", "KL divergence"),),
        "Nats per token. Above 1, the average token is e times less likely under the start policy.",
    ),
    Panel(
        "Length of replies",
        (("completion_tokens", "mean"), ("thinking_tokens", "of the thinking"), ("answer_tokens", "of the answer")),
        "Tokens per reply.",
    ),
    Panel(
        "Steps",
        (("steps_per_reply", "steps"),),
        "Steps of a reply, if a process reward model rates them.",
        measured=True,
    ),
    Panel("Tool calls", (("tool_calls", "calls"),), "Calls of an episode.", measured=True),
    Panel("Failed tool calls", (("tool_errors", "failed"),), "Share of the calls.", "share", measured=True),
    Panel("Entropy", (("entropy", "entropy"),), "Nats per token. Near 0, replies to a prompt hardly differ."),
    Panel(
        "Replies by outcome",
        (("finished", "finished"), ("failed", "without a score"), ("truncated", "truncated by the scorer")),
        "Share of the replies of a step.",
        "share",
    ),
    Panel(
        "Clipped tokens",
        (("clipped", "clipped"), ("clipped_low", "at the lower bound"), ("clipped_high", "at the upper bound")),
        "Share of the tokens of a step whose ratio was clipped.",
        "part",
    ),
    Panel(
        "Groups without signal",
        (("flat_groups", "groups whose rewards are all equal"),),
        "They teach nothing: choose prompts of another difficulty, or `advantage.dynamic_sampling`.",
        "share",
    ),
    Panel("Gradient", (("grad_norm", "norm before clipping"),), "Norm of the gradient."),
    Panel("Loss", (("loss", "loss"),), "Loss of the update.", "number"),
)
OF_REWARD_MODELS = (
    Panel("Loss", (("loss", "training"),), "Mean over the pairs of a step.", "number", measured=True),
    Panel(
        "Accuracy",
        (("accuracy", "training"),),
        "Share of the pairs in which the better reply has the higher reward.",
        "share",
        measured=True,
    ),
    Panel("Gradient", (("grad_norm", "norm before clipping"),), "Norm of the gradient."),
)


def run_charts(run: Run) -> list[CaptionedChart]:
    """Return the charts of a run."""
    panels = OF_REWARD_MODELS if run.trains_reward_model else OF_POLICIES
    charts = [curves(panel, run) for panel in panels]
    names = sorted({name for row in run.training for name in row})
    parts = tuple((name, name.removeprefix(COMPONENTS)) for name in names if name.startswith(COMPONENTS))
    verdicts = tuple((name, VERDICT.sub(r"\1", name)) for name in names if VERDICT.search(name))
    if parts:
        charts.append(curves(Panel("Parts of the reward", parts[:COLORS], "Mean of each part.", "number"), run))
    if verdicts:
        words = "Share of the replies of a step."
        charts.append(curves(Panel("Verdicts", verdicts[:COLORS], words, "share"), run))
    charts.append(length_chart(run))
    return [each for each in charts if each is not None]


def curves(panel: Panel, run: Run) -> CaptionedChart | None:
    """Return the lines of a panel, and dots for the measurements of its first metric."""
    lines = [(f"c{i}", words, points) for i, (name, words) in enumerate(panel.series)
             if (points := _points(run.training, name))]  # fmt: skip
    first = panel.series[0][0]
    dots = _points(run.held_out, first) if panel.measured else []
    if not lines and not dots:
        return None
    chart = _axes(panel, [*(points for _, _, points in lines), dots])
    for kind, _, points in lines:
        chart.line(_shorter(points), kind)
    chart.dots(dots, "held")
    legend = [(kind, words) for kind, words, _ in lines]
    if dots:
        legend.append(("held", "held out"))
    return CaptionedChart(panel.title, chart.svg(), panel.words, tuple(legend) if len(legend) > 1 else ())


def length_chart(run: Run) -> CaptionedChart | None:
    """Return the rewards of the last conversations against their lengths, with the correlation."""
    scored = [row for row in run.conversations if row["reward"] is not None]
    # Of the last measurement and the last step with conversations, the one with more.
    last = {row["phase"]: row["step"] for row in scored}
    rows = max(
        ([row for row in scored if (row["phase"], row["step"]) == each] for each in last.items()), key=len, default=[]
    )[:MOST_DOTS]
    if len(rows) < 2:
        return None
    counted = all(row.get("tokens") is not None for row in rows)
    lengths = [float(row["tokens"] if counted else len(row["messages"][-1]["content"])) for row in rows]
    rewards = [float(row["reward"]) for row in rows]
    x, y = _range(lengths, "number"), _range(rewards, "number")
    chart = Chart(
        "Reward against length", x=x, y=y, x_label="tokens" if counted else "characters", y_label="reward",
        x_ticks=[(value, f"{value:,.0f}") for value in _whole(x)], y_ticks=_ticks(y, "number"),
        height=HEIGHT, bottom=BOTTOM,
    )  # fmt: skip
    for kind, right in (("wrong", False), ("c0", None), ("right", True)):
        chart.dots([(a, b) for a, b, row in zip(lengths, rewards, rows, strict=True) if row.get("right") is right],
                   f"small {kind}", radius=3)  # fmt: skip
    found = correlation(np.array(lengths), np.array(rewards))
    related = "No correlation: one is constant" if found is None else f"Correlation {found:+.2f}"
    kinds = {row.get("right") for row in rows}
    named = (("right", "right", True), ("wrong", "wrong", False), ("c0", "not checked", None))
    legend = tuple((f"dot {kind}", words) for kind, words, right in named if right in kinds)
    where = "held-out prompts" if rows[0]["phase"] == "held_out" else "training prompts"
    words = f"{related}; {len(rows):,} replies to {where} at step {rows[0]['step']}."
    return CaptionedChart("Reward against length", chart.svg(), words, legend)


# --- helpers -----------------------------------------------------------------------------------------------------


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    absent = 0.0 if VERDICT.search(name) else None  # a verdict that no reply of the step has
    return [
        (float(row["step"]), float(value))
        for row in rows
        if isinstance(value := absent if row.get(name) is None else row[name], int | float)
    ]


def _shorter(points: Sequence[Point]) -> list[Point]:
    """Return at most `MOST_POINTS` points: means of neighbours."""
    width = math.ceil(len(points) / MOST_POINTS)
    if width <= 1:
        return list(points)
    parts = [points[start : start + width] for start in range(0, len(points), width)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _axes(panel: Panel, lines: Sequence[Sequence[Point]]) -> Chart:
    steps = [x for line in lines for x, _ in line]
    x = (min(0.0, *steps), max(steps)) if max(steps) > 0 else (0.0, 1.0)
    y = _range([value for line in lines for _, value in line], panel.kind)
    ticks = [(value, f"{value:,.0f}") for value in _whole(x)]
    return Chart(panel.title, x, y, "step", x_ticks=ticks, y_ticks=_ticks(y, panel.kind), height=HEIGHT, bottom=BOTTOM)


def _range(values: Sequence[float], kind: str) -> Point:
    """Return the ends of an axis: the values with some room, and 0 for positive ones."""
    if kind == "share":
        return 0.0, 1.0
    low, high = min(values), max(values)
    if kind != "number" and low >= 0:
        return 0.0, high * 1.06 or 1.0
    room = (high - low) * 0.06 or abs(high) * 0.1 or 0.5
    return low - room, high + room


def _whole(ends: Point) -> list[float]:
    return [value for value in round_values(*ends) if value == round(value)]


def _ticks(ends: Point, kind: str) -> list[tuple[float, str]]:
    form = {"share": "{:.0%}", "part": "{:.3g}%", "positive": "{:,.10g}", "number": "{:+.10g}"}[kind]
    values = round_values(*ends)
    return [(value, form.format(value * 100 if kind == "part" else value) if value else "0") for value in values]
