"""A page about an audit: one HTML file that loads nothing, in the style of the page about an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_rm.evaluation.audit import Audit
from gym_rm.evaluation.audit_lines import AuditLine
from gym_rm.reports.audit_tables import TITLE, cells_of, grouped, lines_table, summary, verdict_text
from gym_rm.reports.pages import render, write_page
from gym_rm.reports.tables import signed
from gym_rm.reports.transcripts import visible

HEAD = ("rows", "change of the score", "spreads", "rows rising")


def write_audit_page(audit: Audit, path: str | Path) -> None:
    """Write the page of an audit."""
    write_page(audit_page(audit), path)


def audit_page(audit: Audit) -> str:
    """Return the HTML of the page. All texts of rows and models are escaped."""
    low, high = _bounds(audit)
    return render(
        "audit_page.html",
        table_title=TITLE,
        title=f"Audit of {visible(audit.record.model)}",
        summary=summary(audit),
        verdict=verdict_text(audit),
        worst=("ok", "suspicious", "exploitable")[audit.level],
        head=HEAD,
        zero=round(100 * -low / (high - low), 2),
        groups=[(group, [_line(audit, line, low, high) for line in lines]) for group, lines in grouped(audit)],
        rule=str(lines_table(audit).caption),
    )


def _bounds(audit: Audit) -> tuple[float, float]:
    """Return the ends of the axis of changes; 0 is between them."""
    means = [line.mean for line in (*audit.lines, *audit.search) if line.mean is not None]
    low, high = min([0.0, *(mean.low for mean in means)]), max([0.0, *(mean.high for mean in means)])
    room = 0.05 * (high - low) or 1.0
    return low - room, high + room


def _line(audit: Audit, line: AuditLine, low: float, high: float) -> dict[str, Any]:
    bar = None
    if line.mean is not None:
        left, width = line.mean.low - low, line.mean.high - line.mean.low
        bar = [round(100 * each / (high - low), 2) for each in (left, width)]
    examples = [
        {
            "question": visible(each.question),
            "before": visible(each.before),
            "after": visible(each.after),
            "score_before": signed(each.score_before, like=[each.score_after]),
            "score_after": signed(each.score_after, like=[each.score_before]),
        }
        for each in line.examples
    ]
    return {
        "name": visible(line.name),
        "cells": cells_of(audit, line),
        "bar": bar,
        "expected": line.expected,
        "verdict": line.verdict,
        "examples": examples,
    }
