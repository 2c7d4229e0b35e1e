"""Which replies of a group a judge sees together, and what its verdicts make of them.

| comparisons of N different replies | questions | pairs |
| --- | --- | --- |
| `all_pairs` | N (N - 1) | every two, with each of them first |
| `circular` | N | each with the next one in the call, so that each is first once and second once |
| `reference` | 2 N | each with the reference reply, with each of them first |

`circular` is the default of NeMo Gym's genrm_compare. Equal replies are judged once. A judge that prefers a place
gives equal replies equal means only if each was seen in both places, so in a circle a reply needs both comparisons.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gym_rm.scorers.judge.asking import Ask
from gym_rm.scorers.judge.prompts import Shown

Comparisons: TypeAlias = Literal["all_pairs", "circular", "reference"]
Array: TypeAlias = NDArray[np.float64]
Order: TypeAlias = tuple[int, ...]
IN_ORDER: tuple[Order, ...] = ((0, 1),)
BOTH_ORDERS: tuple[Order, ...] = ((0, 1), (1, 0))


@dataclass(slots=True)
class Case:
    """Replies that a judge sees together.

    Attributes:
        shown: the replies in the order of `rows`.
        rows: the rows that have each reply; none for a reference reply.
        samples: for each sample, the orders in which the replies are shown, with the question.
    """

    shown: Shown
    rows: tuple[tuple[int, ...], ...]
    samples: list[list[tuple[Order, Ask]]] = field(default_factory=list)

    @property
    def asks(self) -> list[Ask]:
        """All questions."""
        return [ask for sample in self.samples for _, ask in sample]

    @property
    def error(self) -> str | None:
        """Why a question has no verdict; None if all have one."""
        return next((ask.error for ask in self.asks if ask.error is not None), None)


def judged(case: Case, *, choices: bool) -> tuple[Array, float] | None:
    """Return the verdicts of a case; None if no sample has all of its verdicts.

    They are the values `[S, K]` of each of K replies in each sample that is complete, and the share of the samples
    whose verdict is the same in both orders, NaN with one order.

    Args:
        case: the case, whose questions were asked.
        choices: whether values are choices (1, 0.5 or 0). A choice that changes with the places of the replies says
            nothing about them, so it is a tie; scores in both places are averaged.
    """
    values, same = [], []
    for sample in case.samples:
        if any(ask.values is None for _, ask in sample):
            continue
        placed = np.array([ask.values for _, ask in sample])
        for row, (order, _) in zip(placed, sample, strict=True):
            if len(order) > 1:
                row[list(order)] = row.copy()
        if len(placed) > 1:
            better = np.sign(placed[:, 0] - placed[:, 1])
            same.append(bool((better == better[0]).all()))
        values.append(np.full(placed.shape[1], 0.5) if choices and same and not same[-1] else placed.mean(axis=0))
    if not values:
        return None
    return np.array(values), float(np.mean(same)) if same else float("nan")


def pairs_of(how: Comparisons, size: int) -> list[tuple[int, int]]:
    """Return the pairs of a group of different replies to compare, by their numbers; see the top of this file."""
    if how == "circular":
        return [(number, (number + 1) % size) for number in range(size)] if size > 1 else []
    return list(itertools.combinations(range(size), 2))


def rows_by_ask(cases: Sequence[Case]) -> Mapping[int, tuple[Ask, set[int]]]:
    """Return each question once, by its id, with the rows that it is about."""
    found: dict[int, tuple[Ask, set[int]]] = {}
    for case in cases:
        rows = {row for rows in case.rows for row in rows}
        for ask in case.asks:
            found.setdefault(id(ask), (ask, set()))[1].update(rows)
    return found
