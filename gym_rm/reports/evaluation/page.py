"""A page about an evaluation: one HTML file that loads nothing, with charts, tables and the most wrong rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gym_rm
from gym_rm.evaluation.best_of_n import BestOfN
from gym_rm.evaluation.bootstrap import Interval
from gym_rm.evaluation.preferences import PreferenceReport
from gym_rm.evaluation.report import SetEvaluation, notes
from gym_rm.plain_values import to_plain
from gym_rm.reports.evaluation.charts import best_of_n_chart, calibration_chart, margin_chart
from gym_rm.reports.evaluation.tables import ResultTable, model_names, result_tables
from gym_rm.reports.pages import message_texts, render, write_page
from gym_rm.reports.tables import signed
from gym_rm.reports.transcripts import cut, visible
from gym_rm.types import Message


def write_evaluation_page(
    evaluations: Sequence[SetEvaluation], path: str | Path, *, tables: Sequence[ResultTable] = ()
) -> Path:
    """Write the page of one or more sets, and further tables such as benchmarks; return the path."""
    return write_page(evaluation_page(evaluations, tables=tables), path)


def evaluation_page(evaluations: Sequence[SetEvaluation], *, tables: Sequence[ResultTable] = ()) -> str:
    """Return the HTML of the page. All texts of rows and models are escaped."""
    first = evaluations[0] if evaluations else None
    names = model_names(first) if first else []
    return render(
        "evaluation_page.html",
        title=f"Evaluation of {' and '.join(names) or 'a reward model'}",
        about=_about(first.first.scored.provenance if first else None),
        sets=[_set(each) for each in evaluations],
        tables=tables,
    )


def _about(provenance: Mapping[str, Any] | None) -> str:
    shown = [f"gym_rm {gym_rm.__version__}"]
    for name, value in (provenance or {}).items():
        if value and name in ("model", "revision", "template_hash", "dtype", "device", "layout"):
            shown.append(f"{name}: {visible(str(value))}")
    settings = (provenance or {}).get("settings")
    return " · ".join([*shown, f"settings: {visible(json.dumps(to_plain(settings)))}"] if settings else shown)


def _set(evaluation: SetEvaluation) -> dict[str, Any]:
    return {
        "name": visible(evaluation.name),
        "models": model_names(evaluation),
        "numbers": _numbers(evaluation),
        "notes": [visible(note) for note in notes(evaluation)],
        "charts": _charts([each.preferences for each in evaluation.models], evaluation.curves),
        "tables": result_tables(evaluation),
        "worst": [_pair(evaluation, each) for each in evaluation.worst()],
    }


def _numbers(evaluation: SetEvaluation) -> list[tuple[str, str, str]]:
    found, compared = evaluation.first.preferences, evaluation.comparison
    shown = []
    if found.accuracy is not None:
        shown.append(("accuracy", found.accuracy))
    for curve in evaluation.curves[:1]:
        shown.append((f"best of {curve.ns[-1]}, {visible(curve.gold)}", curve.picked[-1]))
    numbers = [(f"{each.value:.1%}", words, _range(each)) for words, each in shown]
    if compared is not None:
        words = f"accuracy minus {model_names(evaluation)[1]}"
        numbers.append((f"{compared.difference.value:+.1%}", words, _range(compared.difference)))
    return [*numbers, (f"{found.metrics.num_pairs:,}", "pairs", f"of {found.num_comparisons:,} rows")]


def _charts(both: Sequence[PreferenceReport], curves: Sequence[BestOfN]) -> list[dict[str, Any]]:
    charts: list[dict[str, Any]] = []

    def add(title: str, svg: str, words: str, *, legend: str = "models") -> None:
        charts.append({"title": title, "svg": svg, "words": words, "legend": legend})

    if curves:
        words = (
            "The reply with the highest reward among n, by the unbiased estimator over all subsets; the band is 95 %."
        )
        add(f"Best-of-n by {curves[0].gold}", best_of_n_chart(curves), words, legend="curves")
    if not both[0].metrics.num_pairs:
        return charts
    words = "Left of the line, the model prefers the reply that the data rejects. The first model, if there are two."
    add("Margins", margin_chart(both[0].pairs.margins), words, legend="")
    words = "On the diagonal, the model is as often right as it says. Larger dots have more pairs."
    add("Calibration", calibration_chart([each.calibration for each in both]), words)
    return charts


def _pair(evaluation: SetEvaluation, pair: Mapping[str, Any]) -> dict[str, Any]:
    row, first, second = pair["row"], pair["first"], pair["second"]
    scored = evaluation.first.scored
    comparison, rewards = scored.comparisons[row], scored.scores[row].rewards
    return {
        "where": visible(comparison.where or f"row {row}"),
        "numbers": f"margin {signed(pair['margin'])}",
        "earlier": [*map(message_texts, comparison.prompt[:-1])],
        "asked": [*map(message_texts, comparison.prompt[-1:])],
        "chosen": {"text": _reply(comparison.replies[first]), "reward": signed(rewards[first])},
        "rejected": {"text": _reply(comparison.replies[second]), "reward": signed(rewards[second])},
    }


def _reply(messages: Sequence[Message]) -> str:
    if len(messages) == 1:
        return cut(messages[0]["content"] or "")
    return "\n\n".join(f"{each['role']}: {cut(each['content'] or '')}" for each in messages)


def _range(interval: Interval) -> str:
    return f"95 %: {interval.low:.1%} to {interval.high:.1%}"
