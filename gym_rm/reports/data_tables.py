"""Console tables of an inspected data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gym_rm.data.findings import Finding
from gym_rm.data.inspection import Inspection, Quantiles
from gym_rm.reports.tables import plain_table
from gym_rm.reports.transcripts import visible

QUANTILES = ("least", "median", "90 %", "99 %", "most")


def inspection_report(found: Inspection) -> Group:
    """Return what the terminal shows of an inspection."""
    parts: list[RenderableType] = [_summary(found), _lengths_table(found)]
    if "" not in found.sources or len(found.sources) > 1:
        table = plain_table("", "Source", "comparisons", numbers=("comparisons",))
        for name, count in found.sources.items():
            table.add_row(Text(visible(name) or "(none)"), f"{count:,}")
        parts.append(table)
    if any(found.objectives.values()):
        parts.append(_quantiles_table("Rating", found.objectives))
    parts.append(_findings_table("Dropped rows", found.dropped, "no row was dropped"))
    parts.append(_findings_table("Duplicates", [each for each in found.duplicates if each.count], "none"))
    parts.append(_findings_table("Possible mistakes", found.remarks, "none found"))
    return Group(*parts)


def _summary(found: Inspection) -> Text:
    used = sum(found.shapes.values())
    shapes = ", ".join(f"{count:,} {shape}" for shape, count in found.shapes.items())
    replies = ", ".join(f"{count:,} of {size}" for size, count in found.replies.items())
    lines = [
        f"{used:,} of {found.rows:,} rows are used ({shapes}).",
        f"Replies per comparison: {replies}. Pairs with a preference: {found.pairs:,}. Ties: {found.ties:,}. "
        f"Without ranks: {found.unranked:,}.",
    ]
    bias = found.length_bias
    if bias.accuracy is not None:
        lines.append(
            f"The preferred reply is the longer one in {bias.longer:,} pairs, the shorter one in {bias.shorter:,}, and "
            f"equally long in {bias.equal:,}: preferring length alone is right in {bias.accuracy:.1%}."
        )
    if found.steps is not None:
        lines.append(f"Labels of steps: {found.steps.count:,}, {found.steps.mean:.1%} good.")
    text = Text(visible(found.name), style="bold")
    return text.append("\n" + visible("\n".join(lines)), style="not bold")


def _lengths_table(found: Inspection) -> Table:
    table = _quantiles_table("Length", found.lengths)
    if found.margins is not None:
        table.add_row("margin", *(f"{value:,.3g}" for value in _five(found.margins)))
    return table


def _quantiles_table(title: str, rows: Mapping[str, Quantiles | None]) -> Table:
    table = plain_table("", title, *QUANTILES, numbers=QUANTILES)
    for name, values in rows.items():
        if values is not None:
            numbers = (f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in _five(values))
            table.add_row(Text(visible(name)), *numbers)
    return table


def _five(values: Quantiles) -> tuple[float, ...]:
    return values.minimum, values.median, values.p90, values.p99, values.maximum


def _findings_table(title: str, findings: Sequence[Finding], none: str) -> RenderableType:
    if not findings:
        return Text(f"{title}: {none}.")
    table = plain_table("", title, "rows", "for example", numbers=("rows",))
    for each in findings:
        places = ", ".join(place.rsplit("/", 1)[-1] for place in each.examples)  # without the folders of their files
        table.add_row(Text(visible(each.text)), f"{each.count:,}", Text(visible(places)))
    return table
