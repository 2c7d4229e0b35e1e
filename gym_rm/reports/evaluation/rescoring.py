"""The table and the page of `gym-rm rescore`."""

from __future__ import annotations

from pathlib import Path

from gym_rm.data.rows import sampled
from gym_rm.evaluation.rescoring import Rescoring
from gym_rm.reports.evaluation.tables import ResultTable
from gym_rm.reports.pages import message_texts, render, write_page
from gym_rm.reports.svg import Chart, round_values
from gym_rm.reports.tables import signed

MOST_DOTS = 2000


def rescoring_table(found: Rescoring) -> ResultTable:
    """Return the numbers of a comparison."""
    rows = [(name, f"{each:,}" if isinstance(each, int) else f"{each:.3f}") for name, each in found.numbers.items()]
    return ResultTable("Old and new rewards", ("", "value"), rows)


def write_rescoring_page(found: Rescoring, path: Path, *, about: str) -> None:
    """Write the page of a comparison. All texts of rows are escaped."""
    (x, x_ticks), (y, y_ticks) = map(_axis, (found.old.tolist(), found.new.tolist()))
    chart = Chart("New rewards by old ones", x=x, y=y, x_ticks=x_ticks, y_ticks=y_ticks, height=380)
    chart.x_label, chart.y_label = "old reward", "new reward"
    for old, new, right in sampled([*zip(found.old, found.new, found.right, strict=True)], MOST_DOTS, seed=0):
        chart.dots([(old, new)], {0.0: "bad", 1.0: "good"}.get(right, "model"), radius=3)
    most = {index: [*map(message_texts, messages)] for index, messages in found.most_changed.items()}
    shown = {"found": found, "chart": chart.svg(), "most": most, "table": rescoring_table(found), "signed": signed}
    write_page(render("rescoring_page.html", title="Rollouts, scored again", about=about, **shown), path)


def _axis(values: list[float]) -> tuple[tuple[float, float], list[tuple[float, str]]]:
    low, high = min(values), max(values)
    ticks = round_values(low, high) if low < high else [low]
    return (low, high), [(each, f"{each:g}") for each in ticks]
