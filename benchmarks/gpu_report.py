"""The pages that gpu_day.py writes about its rows: report.md, and the table for the README."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_predictions import CHIPS, predictions

TITLES = {
    "A": "Versions, tests, attention",
    "B": "Bits of products and of scores",
    "C": "Speed of scoring",
    "D": "Precision, memory, loading",
    "E": "Training, decoding, the planner",
}
Row = Mapping[str, Any]


def write(output: Path) -> None:
    """Write report.md and readme_table.md from the rows in the folder."""
    rows = [json.loads(line) for part in TITLES for line in _lines(output / f"part_{part}.jsonl")]
    (output / "report.md").write_text("\n".join(_report(rows)) + "\n", encoding="utf-8")
    (output / "readme_table.md").write_text("\n".join(_readme(rows)) + "\n", encoding="utf-8")
    print(f"wrote {output / 'report.md'} and {output / 'readme_table.md'}: {len(rows)} rows")


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def _report(rows: Sequence[Row]) -> Iterator[str]:
    errors, skipped = (sum(kind in row for row in rows) for kind in ("error", "skipped"))
    yield f"# GPU day: {len(rows)} rows, {errors} with an error, {skipped} skipped\n"
    yield f"{_machine(rows)}\n"
    yield "## Goals\n"
    yield from _table(("goal", "measured", "reached"), _goals(rows))
    yield "\n## Predictions\n"
    chip = _chip(rows)
    columns = ("what", *(f"predicted, {name}" for name in CHIPS), "measured", f"measured / predicted, {chip or '-'}")
    yield from _table(columns, _compared(rows, chip))
    for part, title in TITLES.items():
        yield f"\n## {part}: {title}\n"
        of_part = [row for row in rows if row["part"] == part]
        if not of_part:
            yield "This part was not run."
        for name in dict.fromkeys(row["name"] for row in of_part):
            of_name = [row for row in of_part if row["name"] == name]
            yield f"**{name}**\n"
            yield from _table(*_cells(of_name))
            yield ""


def _cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and cells of rows with one name; what is nested is one cell each."""
    columns = list(dict.fromkeys(key for row in rows for key in (*row["parameters"], *row.get("result", ()))))
    cells = []
    for row in rows:
        values = {**row["parameters"], **row.get("result", {})}
        why = row.get("error") or row.get("skipped") or ""
        kind = "error: " if "error" in row else "skipped: " if "skipped" in row else ""
        cells.append([*(_show(values.get(key, "")) for key in columns), f"{row['seconds']:.1f}", kind + _short(why)])
    return [*columns, "seconds", "why"], cells


def _compared(rows: Sequence[Row], chip: str | None) -> Iterator[list[str]]:
    for each in predictions():
        measured = _value(rows, each.name, each.result, **each.parameters)
        ratio = "" if measured is None or chip is None else f"{measured / each.values[chip]:.2f}"
        yield [each.what, *(_show(each.values[name]) for name in CHIPS), _show(measured), ratio]


def _goals(rows: Sequence[Row]) -> Iterator[list[str]]:
    for each in predictions():
        if each.goal is not None:
            lower = each.what.endswith(" s")  # seconds
            measured = _value(rows, each.name, each.result, **each.parameters)
            reached = measured is not None and (measured <= each.goal if lower else measured >= each.goal)
            text = f"{each.what}: {'at most' if lower else 'at least'} {_show(each.goal)}"
            yield [text, _show(measured), _reached(measured, reached)]
    share = share_of_fastest(rows)
    text = "scores that are bit-equal, at least 0.93 of the fastest"
    yield [text, _show(share), _reached(share, share is not None and share >= 0.93)]


def share_of_fastest(rows: Sequence[Row]) -> float | None:
    """Return the rate of the fastest rung that kept all bits over that of the fastest of all; None if none did."""
    found = [row for row in rows if row["name"] == "one conversation in batches" and "result" in row]
    found = [row for row in found if row["parameters"]["rung"] not in ("fp8", "int8")]
    rates = [(row["result"]["tokens_per_second"], row["result"]["other_bits"] == 0) for row in found]
    equal = [rate for rate, kept in rates if kept]
    return max(equal) / max(rate for rate, _ in rates) if equal else None


def _reached(measured: float | None, reached: bool) -> str:
    return "not measured" if measured is None else "yes" if reached else "no"


def _readme(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table of the README: scoring by model and batch, beside transformers and vLLM."""
    yield f"{_machine(rows)}\n"
    columns = ("model", "tokens in a batch", "unique tokens/s", "of matmul rate", "with texts", "transformers, padded")
    cells = []
    for row in rows:
        if row["name"] != "scoring" or "result" not in row:
            continue
        shown, result = row["parameters"], row["result"]
        others = [_value(rows, name, "tokens_per_second_with_texts", **shown) for name in ("padded", "vLLM")]
        ours = result["tokens_per_second_with_texts"]
        cells.append([shown["size"], f"{shown['tokens']:,}", _show(result["tokens_per_second"])])
        cells[-1] += [f"{result['share_of_matmul']:.0%}", _show(ours)]
        cells[-1] += ["" if other is None else f"{_show(other)} ({ours / other:.1f}x)" for other in others]
    yield from _table((*columns, "vLLM"), cells)


def _value(rows: Iterable[Row], name: str, result: str, **parameters: Any) -> float | None:
    """Return a number of the first row with this name and these parameters; None if there is none."""
    for row in rows:
        fits = row["name"] == name and all(row["parameters"].get(key) == value for key, value in parameters.items())
        if fits and result in row.get("result", {}):
            return float(row["result"][result])
    return None


def _versions(rows: Sequence[Row]) -> Mapping[str, Any]:
    return next((row["result"] for row in rows if row["name"] == "versions" and "result" in row), {})


def _machine(rows: Sequence[Row]) -> str:
    found = _versions(rows)
    driver = f", driver {found['driver']}, CUDA {found['cuda']}" if "driver" in found else ""
    return f"{found.get('machine', 'part A was not run')}{driver}"


def _chip(rows: Sequence[Row]) -> str | None:
    return next((name for name in CHIPS if name in _versions(rows).get("gpu", "")), None)


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_show(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_show, value))
    return "" if value is None else str(value)


def _short(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:300]


def _table(columns: Sequence[str], cells: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "| --- " * len(columns) + "|"
    for row in cells:
        yield f"| {' | '.join(row)} |"
