"""The table and the page of `gym-rm rescore`."""

from __future__ import annotations

from pathlib import Path

from gym_rm.data.rows import sampled
from gym_rm.evaluation.rescoring import Rescoring
from gym_rm.reports.evaluation.tables import ResultTable
from gym_rm.reports.pages import message_texts, render, write_page
from gym_rm.reports.svg import Chart, round_values
from gym_rm.reports.tables import signed
from gym_rm.reports.transcripts import visible


def rescoring_table(found: Rescoring) -> ResultTable:
    """Return the numbers of a comparison, then the conversations that change most."""
    rows = [(name, f"{each:,}" if isinstance(each, int) else f"{each:.3f}") for name, each in found.numbers.items()]
    for index, line, _, change in found.most_changed:
        both = f"{signed(found.old[index])} → {signed(found.new[index])}"
        rows.append((f"line {line}: the advantage changes by {change:.2f}", both))
    return ResultTable("Old and new rewards", ("", "value"), rows)


def write_rescoring_page(found: Rescoring, path: Path, *, about: str) -> None:
    """Write the page of a comparison. All texts of rows are escaped."""
    x, y = ((min(column), max(column)) for column in (found.old.tolist(), found.new.tolist()))
    ticks = [(round_values(*ends) if ends[0] < ends[1] else ends) for ends in (x, y)]
    x_ticks, y_ticks = ([(each, f"{each:g}") for each in values] for values in ticks)
    chart = Chart("New rewards by old ones", x, y, "old reward", "new reward", x_ticks, y_ticks, height=380)
    for old, new, right in sampled([*zip(found.old, found.new, found.right, strict=True)], 2000, seed=0):
        chart.dots([(old, new)], {0.0: "bad", 1.0: "good"}.get(right, "model"), radius=3)
    shown = {"found": found, "chart": chart.svg(), "table": rescoring_table(found)}
    functions = {"message_texts": message_texts, "signed": signed, "about": visible(about)}
    write_page(render("rescoring_page.html", title="Rollouts, scored again", **shown, **functions), path)
