"""Tables of an evaluation, for the page and for the console: all cells are texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from gym_rm.evaluation.benchmarks.rows import BenchmarkResult
from gym_rm.evaluation.best_of_n import BestOfN
from gym_rm.evaluation.bootstrap import Interval
from gym_rm.evaluation.judges import JudgeReport
from gym_rm.evaluation.preferences import Group, PreferenceReport
from gym_rm.evaluation.report import SetEvaluation
from gym_rm.reports.tables import plain_table
from gym_rm.reports.transcripts import visible


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A table: title, names of the columns, rows and sentences below; the first column is text, the others numbers."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def result_tables(evaluation: SetEvaluation) -> list[ResultTable]:
    """Return the tables of one set: accuracies, other metrics, and best-of-n if it was asked for."""
    both, curves = [each.preferences for each in evaluation.models], evaluation.curves
    names = model_names(evaluation)
    tables = [
        ResultTable("Accuracy", ("pairs", "number", *names), _accuracy_rows(both)),
        ResultTable("Rows, margins and calibration", ("", *names), _metric_rows(both)),
    ]
    if curves:
        head = ("n", *names, "perfect pick", "random reply")
        tables.append(ResultTable(f"Best-of-n by {visible(curves[0].gold)}", head, _curve_rows(curves)))
    return [*tables, *judge_tables(names, [each.judge for each in both])]


def judge_tables(names: Sequence[str], judges: Sequence[JudgeReport | None]) -> list[ResultTable]:
    """Return the table of what the models are worth as judges; none if no model is one."""
    rows: dict[str, Callable[[JudgeReport], str]] = {
        "questions": lambda judge: f"{judge.num_questions:,}",
        "questions without a verdict": lambda judge: _interval(judge.refused),
        "verdicts for the reply shown first": lambda judge: _interval(judge.prefers_first),
        "same verdict in the other order": lambda judge: _interval(judge.position_consistent),
        "probability of all verdicts": lambda judge: _interval(judge.verdict_mass),
        "difference of samples (std)": lambda judge: _number(judge.disagreement),
        "answers per verdict": lambda judge: _number(judge.answers_per_verdict),
        "tokens per verdict": lambda judge: _number(judge.tokens_per_verdict),
        "seconds per verdict": lambda judge: _number(judge.seconds_per_verdict),
    }
    if not any(judges):
        return []
    cells = [[name, *("" if each is None else show(each) for each in judges)] for name, show in rows.items()]
    said = [(name, note) for name, each in zip(names, judges, strict=True) if each is not None for note in each.notes()]
    notes = [note if len(names) == 1 else f"{name}: {note}" for name, note in said]
    return [ResultTable("Judge", ("", *names), [row for row in cells if any(row[1:])], notes)]


def benchmark_tables(results: Sequence[BenchmarkResult]) -> list[ResultTable]:
    """Return the total, the sections and the subsets of a benchmark, and the judges, with a column for each model."""
    if not results:
        return []
    values = [{name: value for name, value, _ in each.table_rows()} for each in results]
    rows = [
        [visible(name), "" if count is None else f"{count:,}", *(_share(each.get(name)) for each in values)]
        for name, _, count in results[0].table_rows()
    ]
    notes = [visible(note) for note in dict.fromkeys(note for each in results for note in each.notes())]
    names = [visible(each.model) for each in results]
    table = ResultTable(results[0].benchmark, ("", "rows", *names), rows, notes)
    return [table, *judge_tables(names, [each.judge for each in results])]


def console_table(table: ResultTable) -> Table:
    """Return a table for the console."""
    shown = plain_table(Text(table.title), *table.head, numbers=table.head[1:])
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown


def model_names(evaluation: SetEvaluation) -> list[str]:
    """Return the name of the model, or of both."""
    return [visible(each.scored.model) for each in evaluation.models]


def _groups(report: PreferenceReport) -> dict[str, Group]:
    groups: list[Group] = []
    if report.accuracy is not None:
        groups.append(Group("all pairs", report.metrics.num_pairs, report.accuracy))
    for words, group in (("shorter", report.chosen_shorter), ("longer", report.chosen_longer)):
        if group is not None:
            groups.append(Group(f"better reply is {words}", group.num_pairs, group.accuracy))
    sources = report.by_source if len(report.by_source) > 1 else ()
    return {visible(each.name): each for each in (*groups, *sources)}


def _accuracy_rows(both: Sequence[PreferenceReport]) -> list[list[str]]:
    groups = [_groups(each) for each in both]
    return [
        [name, f"{group.num_pairs:,}", *(_interval(each[name].accuracy if name in each else None) for each in groups)]
        for name, group in groups[0].items()
    ]


def _metric_rows(both: Sequence[PreferenceReport]) -> list[list[str]]:
    rows: list[tuple[str, list[str]]] = [
        ("rows", [f"{each.num_comparisons:,}" for each in both]),
        ("rows that are ties", [f"{each.num_ties:,}" for each in both]),
        ("rows without a reward", [f"{each.num_failed:,}" for each in both]),
        ("replies cut to the maximum length", [f"{each.num_truncated:,}" for each in both]),
        ("pairs with equal rewards", [_share(each.metrics.ties) for each in both]),
        ("mean margin", [_number(each.metrics.margin_mean) for each in both]),
        ("margin: 10 %", [_number(each.metrics.margin_p10) for each in both]),
        ("margin: median", [_number(each.metrics.margin_p50) for each in both]),
        ("margin: 90 %", [_number(each.metrics.margin_p90) for each in both]),
        ("loss (Bradley-Terry)", [_number(each.metrics.loss) for each in both]),
        ("calibration error", [_number(each.metrics.calibration_error) for each in both]),
        ("correlation of reward and length", [_number(each.metrics.length_correlation) for each in both]),
    ]
    return [[name, *values] for name, values in rows]


def _curve_rows(curves: Sequence[BestOfN]) -> list[list[str]]:
    first, rows = curves[0], []
    for i, n in enumerate(first.ns):
        picked = (_interval(each.picked[i]) if i < len(each.picked) else "" for each in curves)
        rows.append([str(n), *picked, f"{first.oracle[i]:.3f}", f"{first.random:.3f}"])
    return rows


def _interval(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
