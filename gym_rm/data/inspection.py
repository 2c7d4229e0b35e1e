"""What a set of comparisons holds: shapes, ties, margins, lengths, duplicates and possible mistakes."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gym_rm.data.comparisons import ComparisonSet
from gym_rm.data.findings import Finding, find_duplicates, find_remarks, grouped
from gym_rm.data.pairs import pairs_of
from gym_rm.plain_values import to_plain
from gym_rm.types import Message

MOST_SOURCES = 8


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Distribution of some numbers."""

    count: int
    mean: float
    minimum: float
    median: float
    p90: float
    p99: float
    maximum: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles | None:
        """Return the distribution of the values that are not NaN; None if there are none."""
        array = np.array([value for value in values if not math.isnan(value)], dtype=np.float64)
        if not len(array):
            return None
        return cls(len(array), float(array.mean()), *map(float, np.quantile(array, (0.0, 0.5, 0.9, 0.99, 1.0))))


@dataclass(frozen=True, slots=True)
class LengthBias:
    """Numbers of pairs whose preferred reply has more characters than the other one, fewer, or equally many."""

    longer: int
    shorter: int
    equal: int

    @property
    def accuracy(self) -> float | None:
        """Accuracy of preferring the longer reply, and guessing between equally long ones; None without pairs."""
        pairs = self.longer + self.shorter + self.equal
        return (self.longer + self.equal / 2) / pairs if pairs else None


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a set of comparisons holds. `inspect_comparisons` makes it.

    Attributes:
        name: name of the set.
        rows: number of rows that were read.
        dropped: reasons for rows that are not used.
        shapes: number of used rows by shape.
        replies: number of comparisons by their number of replies.
        pairs: number of pairs with a preference.
        ties: number of comparisons whose replies all have the same rank.
        unranked: number of comparisons without ranks, which have only ratings or labels of steps.
        margins: distribution of the margins.
        objectives: distribution of the ratings by objective.
        steps: distribution of the labels of steps.
        sources: number of comparisons by source.
        lengths: distributions of the numbers of messages and characters, by name.
        length_bias: how often the preferred reply is the longer one.
        duplicates: equal prompts, equal comparisons, contradictory preferences.
        remarks: possible mistakes.
    """

    name: str
    rows: int
    dropped: tuple[Finding, ...]
    shapes: Mapping[str, int]
    replies: Mapping[int, int]
    pairs: int
    ties: int
    unranked: int
    margins: Quantiles | None
    objectives: Mapping[str, Quantiles | None]
    steps: Quantiles | None
    sources: Mapping[str, int]
    lengths: Mapping[str, Quantiles | None]
    length_bias: LengthBias
    duplicates: tuple[Finding, ...]
    remarks: tuple[Finding, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the inspection as plain values for JSON."""
        plain: dict[str, Any] = to_plain(dataclasses.asdict(self))
        plain["length_bias"]["accuracy"] = self.length_bias.accuracy
        return plain


def inspect_comparisons(found: ComparisonSet) -> Inspection:
    """Return what a set holds.

    Example:
        >>> from gym_rm.data.comparisons import load_comparisons
        >>> found = inspect_comparisons(load_comparisons([{"prompt": "2 + 2?", "chosen": "4", "rejected": "five"}]))
        >>> found.pairs, found.length_bias.shorter
        (1, 1)
    """
    comparisons = found.comparisons
    ranked = [each for each in comparisons if each.ranks is not None]
    pairs = [pair for each in comparisons for pair in pairs_of(each)]
    longer = [_characters(pair.chosen) - _characters(pair.rejected) for pair in pairs]
    signs = Counter(np.sign(longer).astype(int).tolist())
    ratings: dict[str, list[float]] = defaultdict(list)
    for each in comparisons:
        for name, values in each.scores.items():
            ratings[name].extend(values)
    return Inspection(
        name=found.name,
        rows=len(comparisons) + len(found.dropped),
        dropped=grouped(
            ((each.reason, each.where) for each in found.dropped), lambda text: text.partition(", got ")[0]
        ),
        shapes=dict(found.shapes),
        replies=dict(sorted(Counter(len(each.replies) for each in comparisons).items())),
        pairs=len(pairs),
        ties=sum(each.is_tie for each in comparisons),
        unranked=len(comparisons) - len(ranked),
        margins=Quantiles.of(each.margin for each in comparisons if each.margin is not None),
        objectives={name: Quantiles.of(values) for name, values in ratings.items()},
        steps=Quantiles.of(label for each in comparisons for labels in each.step_labels or () for label in labels),
        sources=_most_common(Counter(each.source for each in comparisons)),
        lengths={
            "messages of a prompt": Quantiles.of(len(each.prompt) for each in comparisons),
            "characters of a prompt": Quantiles.of(_characters(each.prompt) for each in comparisons),
            "characters of a reply": Quantiles.of(_characters(reply) for each in comparisons for reply in each.replies),
        },
        length_bias=LengthBias(longer=signs[1], shorter=signs[-1], equal=signs[0]),
        duplicates=find_duplicates(comparisons),
        remarks=find_remarks(comparisons),
    )


def _characters(messages: Sequence[Message]) -> int:
    return sum(len(message["content"]) for message in messages)


def _most_common(counts: Counter[str]) -> dict[str, int]:
    """Return the largest counts, and the sum of the others as `"(others)"`."""
    most = dict(counts.most_common(MOST_SOURCES))
    others = counts.total() - sum(most.values())
    return {**most, "(others)": others} if others else most
