"""Rows with a list of replies, each with a rank, a grade, or ratings; and rows with one rated reply."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.data.formats.fields import (
    REPLY_TEXTS,
    Messages,
    answered,
    margin_of,
    number,
    parse_reply,
    ranks_of,
    required_prompt,
    rest,
    source_of,
)
from gym_rm.data.rows import show
from gym_rm.errors import ConfigError
from gym_rm.types import Comparison

REPLY_LISTS = ("completions", "solutions", "responses", "answers")
OVERALL = ("overall_score", "score", "rating")
# Lists beside the list of replies, and the field of a reply with the same meaning.
BESIDE = {"ranks": "rank", "scores": "score"}
# Objectives of HelpSteer2 (arXiv 2406.08673) and other data sets with ratings.
OBJECTIVES = (
    "helpfulness",
    "correctness",
    "coherence",
    "complexity",
    "verbosity",
    "honesty",
    "truthfulness",
    "instruction_following",
    "safety",
    "harmlessness",
    "overall_score",
    "score",
    "rating",
)
PREFERENCES = ("rank", "correct", *OVERALL, "annotations")


def list_field(row: Mapping[str, Any]) -> str | None:
    """Return the name of the list of replies, or None. A list without a preference is not used beside a pair."""
    names = [name for name in REPLY_LISTS if row.get(name) is not None]
    if row.get("chosen") is not None and row.get("rejected") is not None:
        names = [name for name in names if _has_preference(row, row[name])]
    return names[0] if names else None


def _has_preference(row: Mapping[str, Any], replies: Any) -> bool:
    entries = [entry for entry in replies if isinstance(entry, Mapping)] if isinstance(replies, Sequence) else []
    return any(isinstance(row.get(name), list) for name in BESIDE) or any(
        _any_has(entries, name) for name in PREFERENCES
    )


def read_list(row: Mapping[str, Any], name: str, where: str) -> tuple[str, Comparison]:
    """Read a row with a prompt and a list of replies in the field `name`; return its shape, too.

    A reply is a text, messages, or an object with its text and one of these: `rank` (NeMo RL; lower is better),
    `correct` (graded solutions), or `overall_score`, `score` or `rating` (UltraFeedback, arXiv 2310.01377; higher is
    better), from which the ranks are computed. `annotations` of a reply are ratings by objective.
    """
    field, prompt = required_prompt(row, where, "context" if name == "completions" else "prompt")
    entries = _entries(row, name, where)
    names = [f"{name}[{index}]" for index in range(len(entries))]
    replies = [reply_of_entry(entry, where, each) for entry, each in zip(entries, names, strict=True)]
    prompt, kept, reference = answered(prompt, replies, names, where, field)
    shape, ranks, scores = _preference(entries, names, where)
    margin = margin_of(row.get("margin"), where)
    if margin is None and shape == "ratings" and ranks is not None:
        overall = next(iter(scores.values()))
        margin = max(overall) - min(overall)
    metadata = {**rest(row, field, name, "margin", *BESIDE), **reference}
    others = [rest(entry, *REPLY_TEXTS, "rank", "correct", "role", "content") for entry in entries]
    if any(others):
        metadata["replies"] = others
    return shape, Comparison(prompt, kept, ranks, margin, scores, None, source_of(row), where, metadata)


def read_groups(row: Mapping[str, Any], where: str) -> Comparison:
    """Read a row of RewardBench 2 (arXiv 2506.01937): `chosen` and `rejected` are lists of texts, each of one rank."""
    grades = {"chosen": True, "rejected": False}
    entries = [{"completion": text, "correct": grade} for name, grade in grades.items() for text in row[name]]
    return read_list({**rest(row, *grades), "completions": entries}, "completions", where)[1]


def read_rated(row: Mapping[str, Any], where: str) -> Comparison:
    """Read a row with `prompt`, `response` and ratings, such as `helpfulness`; a missing rating is NaN."""
    field, prompt = required_prompt(row, where, "prompt")
    reply = parse_reply(row["response"], where, "response")
    prompt, replies, reference = answered(prompt, (reply,), ("response",), where, field)
    table = row.get("scores")
    rated = dict(table) if isinstance(table, Mapping) else {name: row[name] for name in OBJECTIVES if name in row}
    scores = {name: (math.nan if value is None else number(value, where, name),) for name, value in rated.items()}
    metadata = {**rest(row, field, "response", *scores), **reference}
    return Comparison(prompt, replies, None, None, scores, None, source_of(row), where, metadata)


def are_texts(values: Sequence[Any]) -> bool:
    """Return whether this is a list of texts."""
    return bool(values) and all(isinstance(value, str) for value in values)


def _entries(row: Mapping[str, Any], name: str, where: str) -> list[Mapping[str, Any]]:
    """Return the replies as objects, with the values of lists beside them."""
    values = row[name]
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ConfigError(f"{where}: {name!r} must be a list of at least two replies, got {show(values)}.")
    entries = [value if isinstance(value, Mapping) else {"completion": value} for value in values]
    for beside, field in BESIDE.items():
        column = row.get(beside)
        if column is None:
            continue
        if isinstance(column, str) or not isinstance(column, Sequence) or len(column) != len(entries):
            raise ConfigError(
                f"{where}: {beside!r} must be a list of {len(entries)} numbers, one per reply, got {show(column)}."
            )
        entries = [{**entry, field: each} for entry, each in zip(entries, column, strict=True)]
    return entries


def reply_of_entry(entry: Mapping[str, Any], where: str, name: str) -> Messages:
    """Return the messages of a reply that is an object. Raises ConfigError if it has no text, or two."""
    if "role" in entry and "content" in entry:
        return parse_reply([rest(entry, *PREFERENCES)], where, name)
    found = [key for key in REPLY_TEXTS if entry.get(key) is not None]
    if not found:
        raise ConfigError(
            f"{where}: {name!r} must have the reply in one of the fields {REPLY_TEXTS}, got {show(entry)}."
        )
    if any(entry[key] != entry[found[0]] for key in found[1:]):
        raise ConfigError(f"{where}: {name!r} has a {found[0]!r} and another {found[1]!r}; keep the one to use.")
    return parse_reply(entry[found[0]], where, f"{name}.{found[0]}")


def _preference(
    entries: Sequence[Mapping[str, Any]], names: Sequence[str], where: str
) -> tuple[str, tuple[float, ...] | None, dict[str, tuple[float, ...]]]:
    """Return the shape, the ranks and the scores of the replies."""
    scores = _ratings(entries, names, where)
    if _any_has(entries, "rank"):
        for entry, name in zip(entries, names, strict=True):
            if entry.get("rank") is None:
                raise ConfigError(f"{where}: {name!r} has no 'rank', but other replies have one; expected a number.")
        ranks = tuple(number(entry["rank"], where, f"{name}.rank") for entry, name in zip(entries, names, strict=True))
        return "ranks", ranks, scores
    if _any_has(entries, "correct"):
        grades = tuple(_grade(entry.get("correct"), where, name) for entry, name in zip(entries, names, strict=True))
        return "graded", tuple(1 - grade for grade in grades), {"correct": grades, **scores}
    overall = next((scores[name] for name in OVERALL if name in scores), ())
    known = bool(overall) and not any(map(math.isnan, overall))
    return ("ratings" if scores else "replies"), (ranks_of(overall) if known else None), scores


def _ratings(entries: Sequence[Mapping[str, Any]], names: Sequence[str], where: str) -> dict[str, tuple[float, ...]]:
    """Return the ratings of the replies by objective: first the overall one, then those of `annotations`."""
    overall = next((name for name in OVERALL if _any_has(entries, name)), None)
    columns = [] if overall is None else [(overall, [entry.get(overall) for entry in entries])]
    tables = [entry.get("annotations") for entry in entries]
    aspects = [key for table in tables if isinstance(table, Mapping) for key in table]
    for aspect in dict.fromkeys(aspects):
        cells = [table.get(aspect) if isinstance(table, Mapping) else None for table in tables]
        columns.append((aspect, [_rating(cell) for cell in cells]))
    return {
        aspect: tuple(
            math.nan if value in (None, "N/A") else number(value, where, f"{name}.{aspect}")
            for value, name in zip(values, names, strict=True)
        )
        for aspect, values in columns
    }


def _rating(cell: Any) -> Any:
    """Return the rating of an annotation: a number, an object with `Rating`, or a list of one of these."""
    if isinstance(cell, Sequence) and not isinstance(cell, str) and len(cell) == 1:
        (cell,) = cell
    return cell.get("Rating") if isinstance(cell, Mapping) else cell


def _grade(value: Any, where: str, name: str) -> float:
    if value not in (True, False):
        raise ConfigError(f"{where}: '{name}.correct' must be true or false, got {show(value)}.")
    return float(value)


def _any_has(entries: Sequence[Mapping[str, Any]], field: str) -> bool:
    return any(entry.get(field) is not None for entry in entries)
