"""What another reward would have changed in saved rollouts: numbers, a table and the page of `gym-rm rescore`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from gym_rm.data.rollouts import Rollout
from gym_rm.data.rows import parse_line, present, read_lines, sampled
from gym_rm.errors import ConfigError
from gym_rm.evaluation.bootstrap import FloatArray
from gym_rm.evaluation.stored_scores.output import added_names
from gym_rm.reports.evaluation.tables import ResultTable
from gym_rm.reports.metrics import correlation
from gym_rm.reports.pages import message_texts, render, write_page
from gym_rm.reports.svg import Chart, round_values
from gym_rm.reports.tables import signed
from gym_rm.reports.transcripts import visible
from gym_rm.types import Conversation

Rows: TypeAlias = "Iterator[tuple[int, float, Rollout | None]]"
MOST_CHANGED = 10
LEFT_OUT = ("without a new reward", "without an old reward", "repeated rollouts")
PAIRS = ("share of pairs in the other order", "share of pairs no longer equal", "share of pairs now equal")
FLAT = ("groups that become flat", "groups that stop being flat")


@dataclass(frozen=True, slots=True, eq=False)
class Rescoring:
    """N conversations with two rewards: `old`, `new` and `right` (1, 0, or NaN without a check) are columns `[N]`.

    `numbers` says what changes, by its name in tables. `most_changed` are the largest changes of an advantage: index,
    line, conversation and change; without groups, all conversations are one.
    """

    old: FloatArray
    new: FloatArray
    right: FloatArray
    numbers: Mapping[str, float]
    most_changed: tuple[tuple[int, int, Conversation, float], ...]


def rescored_rows(path: Path, key: str, read: Callable[[Mapping[str, Any], str], Rollout]) -> Rows:
    """Yield the line, the new reward and the rollout of each row of a file; no rollout without a reward in `key`."""
    with path.open("rb") as file:
        for line, text in read_lines(file, str(path)):
            row, where = present(parse_line(text, str(path))), f"{path} line {line}"
            given = {name: value for name, value in row.items() if name not in added_names(key)}
            yield line, row[key], None if row[key] is None else read(given, where)


def compare_rewards(rows: Callable[[], Rows], advantages: Callable[[FloatArray], FloatArray]) -> Rescoring:
    """Compare old and new rewards, above all within the groups of training.

    Rows that lack a reward or repeat a rollout are counted and left out of all else. Accuracy is the share of the pairs
    of a right and a wrong reply of a group whose right one has the higher reward; equal rewards count one half, as in
    the area under the ROC curve. Ranks of equal rewards are their mean rank (Spearman 1904).

    Args:
        rows: returns `rescored_rows`; called twice.
        advantages: returns the advantages of the rewards of a group `[K]`.

    Raises:
        ConfigError: no row has both rewards.
    """
    columns, groups, seen, left_out = list[tuple[float, ...]](), dict[str, int](), set[tuple[str, str]](), [0, 0, 0]
    for line, reward, saved in rows():
        if saved is None or math.isnan(saved.reward) or (saved.group, saved.name) in seen:
            left_out[0 if saved is None else 1 if math.isnan(saved.reward) else 2] += 1
            continue
        seen |= set() if saved.name is None else {(saved.group, saved.name)}
        columns.append((saved.reward, reward, saved.right, groups.setdefault(saved.group, len(groups)), line))
    if not columns:
        raise ConfigError(f"no row has two rewards: {dict(zip(LEFT_OUT, left_out, strict=True))}; see --reward.")
    old, new, right, of_group, lines = np.array(columns, dtype=np.float64).T
    order = np.argsort(of_group, kind="stable")
    members = [each for each in np.split(order, np.flatnonzero(np.diff(of_group[order])) + 1) if len(each) > 1]
    counts, changes = np.zeros(9), np.zeros(len(old)) if members else np.abs(advantages(new) - advantages(old))
    for each in members:
        changes[each] = np.abs(advantages(new[each]) - advantages(old[each]))
        counts += _counts(old[each], new[each], right[each])
    numbers: dict[str, float | None] = {"conversations": len(columns) + sum(left_out)}
    numbers |= zip(LEFT_OUT, left_out, strict=True)
    numbers |= {"Pearson": correlation(old, new), "Spearman": correlation(_ranks(old), _ranks(new))}
    if members:
        numbers |= {"groups": len(members), **dict(zip(FLAT, map(int, counts[7:]), strict=True))}
        numbers |= {"mean change of an advantage": changes[np.concatenate(members)].mean(), "pairs": int(counts[0])}
        numbers |= zip(PAIRS, counts[1:4] / counts[0], strict=True)
    if counts[4]:
        numbers |= {"pairs of a right and a wrong reply": int(counts[4])}
        numbers |= zip(("accuracy, old", "accuracy, new"), counts[5:7] / counts[4], strict=True)
    most = {int(lines[index]): index for index in np.argsort(-changes, kind="stable")[:MOST_CHANGED].tolist()}
    said = {line: saved.row.conversations[0] for line, _, saved in rows() if saved and line in most}
    shown = tuple((index, line, said[line], float(changes[index])) for line, index in most.items())
    return Rescoring(old, new, right, {name: each for name, each in numbers.items() if each is not None}, shown)


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


def _counts(old: FloatArray, new: FloatArray, right: FloatArray) -> FloatArray:
    """Count pairs of a group: all, `PAIRS`, of a right and a wrong reply, these right by each reward; then `FLAT`."""
    was_flat, is_flat = ((rewards == rewards[0]).all() for rewards in (old, new))
    found = np.array([0, 0, 0, 0, 0, 0, 0, is_flat and not was_flat, was_flat and not is_flat], dtype=np.float64)
    for k in range(len(old) - 1):  # row by row: the pairs of a large group do not fit into memory
        was, now, better = (np.sign(column[k + 1 :] - column[k]) for column in (old, new, right))
        decided = np.abs(better) == 1
        kinds = was * now < 0, (was == 0) & (now != 0), (was != 0) & (now == 0), decided
        found[:7] += [len(was), *map(np.sum, kinds), *((1 + sign * better)[decided].sum() / 2 for sign in (was, now))]
    return found


def _ranks(values: FloatArray) -> FloatArray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: FloatArray = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks
