"""What another reward would have changed in saved rollouts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from gym_rm.data.rollouts import Rollout
from gym_rm.data.rows import parse_line, present, read_lines
from gym_rm.errors import ConfigError
from gym_rm.evaluation.answers import is_right
from gym_rm.evaluation.bootstrap import FloatArray
from gym_rm.evaluation.stored_scores.output import added_names
from gym_rm.reports.metrics import correlation
from gym_rm.types import Conversation

Rows: TypeAlias = "Iterator[tuple[int, float, Rollout | None]]"
LEFT_OUT = ("without a new reward", "without an old reward", "repeated rollouts")
PAIRS = ("share of pairs in the other order", "share of pairs no longer equal", "share of pairs now equal")
MOST_CHANGED = 10


@dataclass(frozen=True, slots=True, eq=False)
class Rescoring:
    """N conversations with two rewards: lines of their file, and columns `[N]`.

    `right` is 1 or 0, or NaN without a check. `changes` are those of advantages, or without groups of ranks, as a share
    of N. `numbers` says what changes, by its name in tables. `most_changed` has indices and conversations.
    """

    lines: FloatArray
    old: FloatArray
    new: FloatArray
    right: FloatArray
    changes: FloatArray
    numbers: Mapping[str, float]
    most_changed: Mapping[int, Conversation]


def rescored_rows(path: Path, key: str, read: Callable[[Mapping[str, Any], str], Rollout]) -> Rows:
    """Yield the line, the new reward and the rollout of each row of a file; no rollout without a reward in `key`."""
    with path.open("rb") as file:
        for line, text in read_lines(file, str(path)):
            row, where = present(parse_line(text, str(path))), f"{path} line {line}"
            given = {name: value for name, value in row.items() if name not in added_names(key)}
            yield line, row[key], None if row[key] is None else read(given, where)


def compare_rewards(rows: Callable[[], Rows], advantages: Callable[[FloatArray], FloatArray]) -> Rescoring:
    """Compare old and new rewards within the groups of training.

    Rows that lack a reward or repeat a rollout are counted and left out of all else. Accuracy is the share of the pairs
    of a right and a wrong reply of a group whose right one has the higher reward; equal rewards count one half, as in
    the area under the ROC curve.

    Args:
        rows: returns line, new reward and rollout (None without a new reward) of each row; called twice.
        advantages: returns the advantages of the rewards of a group `[K]`.

    Raises:
        ConfigError: no row has both rewards.
    """
    columns, groups, names, left_out = list[tuple[float, ...]](), dict[str, int](), set[tuple[str, str]](), [0, 0, 0]
    for line, reward, saved in rows():
        if saved is None or math.isnan(saved.reward) or (saved.group, saved.name) in names:
            left_out[0 if saved is None else 1 if math.isnan(saved.reward) else 2] += 1
            continue
        names |= set() if saved.name is None else {(saved.group, saved.name)}
        columns.append((saved.reward, reward, _right(saved), groups.setdefault(saved.group, len(groups)), line))
    if not columns:
        raise ConfigError(f"no row has two rewards: {dict(zip(LEFT_OUT, left_out, strict=True))}; see --reward.")
    old, new, right, of_group, lines = np.array(columns, dtype=np.float64).T
    order = np.argsort(of_group, kind="stable")
    members = [each for each in np.split(order, np.flatnonzero(np.diff(of_group[order])) + 1) if len(each) > 1]
    changes = np.zeros(len(old)) if members else np.abs(_ranks(new) - _ranks(old)) / len(old)
    pairs, flat = np.zeros(7), np.zeros(2, np.int64)
    for each in members:
        changes[each] = np.abs(advantages(new[each]) - advantages(old[each]))
        was, now = (bool((rewards[each] == rewards[each[0]]).all()) for rewards in (old, new))
        flat += now and not was, was and not now
        pairs += _pairs(old[each], new[each], right[each])
    numbers: dict[str, float | None] = {"conversations": len(columns) + sum(left_out)}
    numbers |= zip(LEFT_OUT, left_out, strict=True)
    numbers |= {
        "Pearson": correlation(old, new),
        "Spearman": correlation(_ranks(old), _ranks(new)),
        "groups": len(members),
    }
    if members:
        numbers |= zip(("groups that become flat", "groups that stop being flat"), flat.tolist(), strict=True)
        numbers |= {"mean change of an advantage": changes[np.concatenate(members)].mean(), "pairs": int(pairs[0])}
        numbers |= zip(PAIRS, pairs[1:4] / pairs[0], strict=True)
    if pairs[4]:
        numbers |= {"pairs of a right and a wrong reply": int(pairs[4])}
        numbers |= zip(("accuracy, old", "accuracy, new"), pairs[5:] / pairs[4], strict=True)
    most = np.argsort(-changes, kind="stable")[:MOST_CHANGED].tolist()
    index_of = {int(lines[index]): index for index in most}
    said = {index_of[line]: saved.row.conversations[0] for line, _, saved in rows() if saved and line in index_of}
    known = {name: value for name, value in numbers.items() if value is not None}
    return Rescoring(lines, old, new, right, changes, known, {index: said[index] for index in most})


def _pairs(old: FloatArray, new: FloatArray, right: FloatArray) -> FloatArray:
    """Count the pairs of a group: all, those of `PAIRS`, of a right and a wrong reply, and right by each reward."""
    found = np.zeros(7)
    for k in range(len(old) - 1):  # row by row: the pairs of a large group do not fit into memory
        was, now, better = (np.sign(column[k + 1 :] - column[k]) for column in (old, new, right))
        decided = np.abs(better) == 1
        kinds = was * now < 0, (was == 0) & (now != 0), (was != 0) & (now == 0), decided
        found += [len(was), *map(np.sum, kinds), *((1 + sign * better)[decided].sum() / 2 for sign in (was, now))]
    return found


def _ranks(values: FloatArray) -> FloatArray:
    """Return the ranks, of equal values their mean (Spearman 1904)."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: FloatArray = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks


def _right(saved: Rollout) -> float:
    """Return the grade of a row; without one, whether the reply ends with the answer, if that is a number."""
    answer, said = saved.row.prompt.answer or "", saved.row.conversations[0][-1].get("content") or ""
    checked = math.isnan(saved.right) and re.fullmatch(r"-?[\d,]*\.?\d+", answer)
    return float(is_right(said, answer)) if checked else saved.right
