"""Console tables of an audit: one line per change of the replies, and the worst examples."""

from __future__ import annotations

import math

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gym_rm.evaluation.audit import JUDGE_ROWS, LEVELS, Audit
from gym_rm.evaluation.audit_lines import CONFIDENCE, SMALL, AuditLine
from gym_rm.evaluation.perturbations import CHANGES
from gym_rm.reports.tables import plain_table, signed
from gym_rm.reports.transcripts import cut, visible

_SHORT = {each.name for each in CHANGES if not each.every}  # of those that are ok, a group shows its strongest
TITLE = "Change of the score when a reply is changed"
MOST_EXAMPLES = 6
MOST_CHARACTERS = 160  # of a text of an example; a longer one is cut in the middle
STYLES = {"ok": "green", "suspicious": "yellow", "exploitable": "bold red", "not judged": "dim"}
LEVEL_STYLES = ("green", "yellow", "bold red")


def audit_report(audit: Audit) -> Group:
    """Return what the terminal shows of an audit."""
    parts: list[Text | Table] = [Text("\n".join(summary(audit)) + "\n"), _lines_table(audit)]
    examples = _examples_table(audit)
    if examples.row_count:
        parts.append(examples)
    return Group(*parts, Text(_verdict_text(audit), style=LEVEL_STYLES[audit.level]))


def summary(audit: Audit) -> list[str]:
    """Return in a few lines what was audited, and in which unit."""
    record = audit.record
    revision = f" ({record.revision})" if record.revision else ""
    dropped = f", {audit.dropped} without a usable reply" if audit.dropped else ""
    lines = [
        f"Audit of {visible(record.model)}{revision}: {audit.num_rows} rows of {visible(record.rows)}{dropped}, "
        f"{audit.scored:,} scored {'replies' if audit.compares else 'conversations'}.",
    ]
    if audit.compares:
        lines.append("A change is the reward of the changed reply minus that of the good reply beside it.")
    else:
        lines.append(f"Score of a good reply: {signed(audit.score_mean)}, standard deviation {audit.score_std:.3g}.")
    if audit.margin_mean is not None and audit.margin_std is not None:
        lines.append(
            f"Margin over a worse reply of the same row: {signed(audit.margin_mean)}, standard deviation "
            f"{audit.margin_std:.3g} ({audit.num_pairs} rows)."
        )
    if audit.compares:
        lines.append(f"One spread is {audit.spread:.3g}, the root mean square of the margins, or 1 without them.")
    elif audit.spread:
        of = "margins" if audit.spread == audit.margin_std else "scores of good replies"
        lines.append(f"One spread is {audit.spread:.3g}, the standard deviation of the {of}.")
    if audit.smallest_hole is not None:
        lines.append(
            f"With these rows, a change of the list that adds {audit.smallest_hole:.2g} spreads to every score is "
            "called exploitable in 9 of 10 audits."
        )
    if audit.holes:
        sizes = ", ".join(f"{group} {size:.2g}" for group, size in audit.holes.items())
        lines.append(f"With what the changes cost, a bonus for a kind is found from this many spreads on: {sizes}.")
    return lines


def _lines_table(audit: Audit) -> Table:
    caption = (
        f"Intervals of {CONFIDENCE:.2%}; the verdicts use their ends. exploitable: the score rises by more than "
        f"{SMALL} spreads, and on more rows than it falls on. suspicious: it rises by less, or on more rows than it "
        "falls on, or it must fall and may stay. Rows that stay count as half rising. Of a group's additions and cuts "
        "that are ok, only the strongest is shown."
    )
    numbers = ("rows", "change of the score", "spreads", "rows rising")
    table = plain_table(TITLE, "change", *numbers, "expected", "verdict", numbers=numbers)
    table.caption, table.padding = caption, (0, 1, 0, 0)
    for group in dict.fromkeys(line.group for line in audit.lines):
        lines = [line for line in audit.lines if line.group == group]
        table.add_row(Text(group, style="bold"))
        strongest = max(lines, key=lambda line: -math.inf if line.mean is None else line.mean.value)
        for line in lines:
            if line.verdict == "ok" and line is not strongest and line.name in _SHORT:
                continue
            style = STYLES[line.verdict]
            cells = [f"  {visible(line.name)}", *_cells_of(audit, line), line.expected]
            table.add_row(*map(Text, cells), Text(line.verdict, style=style))
    return table


def _cells_of(audit: Audit, line: AuditLine) -> list[str]:
    """Return the number of rows, the change with its interval, the change in spreads, and the share that rises."""
    rows = f"{line.rows}" + (f" ({line.failed} failed)" if line.failed else "")
    if line.mean is None or line.rises is None:
        return [rows, "", "", ""]
    spreads, ends = audit.in_spreads(line), (line.mean.value, line.mean.low, line.mean.high)
    # All with the decimals that a change of one spread needs.
    value, low, high = (signed(each, like=(*ends, audit.spread)) for each in ends)
    rises = f"{line.rises.value:.0%} [{line.rises.low:.0%}, {line.rises.high:.0%}]"
    return [rows, f"{value} [{low}, {high}]", "" if spreads is None else f"{spreads:+.2f}", rises]


def _examples_table(audit: Audit) -> Table:
    """Return the row that rose the most of each line that is not ok; of the worst lines only."""
    table = Table(title="Worst examples", title_justify="left", show_lines=True)
    for name in ("change", "question", "before", "after"):
        table.add_column(name, overflow="fold", ratio=1)
    record, lines = audit.record, {line.name: line for line in audit.lines}
    for name in (*record.exploitable, *record.suspicious)[:MOST_EXAMPLES]:
        for example in lines[name].examples[:1]:
            both = (example.score_before, example.score_after)
            texts = [
                Text(f"{cut(repr(text), MOST_CHARACTERS)}\n").append(signed(score, like=both), "dim")
                for text, score in ((example.before, both[0]), (example.after, both[1]))
            ]
            table.add_row(
                Text(visible(audit.in_words(lines[name]))), Text(cut(repr(example.question), MOST_CHARACTERS)), *texts
            )
    return table


def _verdict_text(audit: Audit) -> str:
    """Return the warning level with the names of the findings, and how many changes are not judged."""
    text = f"Warning level {audit.level} of 2: {LEVELS[audit.level]}."
    for word, names in (("Exploitable", audit.record.exploitable), ("Suspicious", audit.record.suspicious)):
        text += f" {word}: {'; '.join(map(visible, names))}." if names else ""
    if unknown := sum(line.verdict == "not judged" and line.rows > 0 for line in audit.lines):
        text += f" {unknown} changes may pay, but fewer than {JUDGE_ROWS} rows show nothing: use more."
    return text
