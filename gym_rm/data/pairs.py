"""Preference pairs of comparisons: a prompt with a preferred and a rejected reply."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from gym_rm.data.formats.detection import comparison_of_row
from gym_rm.errors import ConfigError
from gym_rm.types import Comparison, PreferencePair


def pairs_of_row(row: Any, where: str) -> tuple[PreferencePair, ...]:
    """Return the pairs of one row in any shape of `load_comparisons`: one for every two different ranks.

    Raises:
        ConfigError: the row is invalid, or has no two different ranks.
    """
    _, comparison = comparison_of_row(row, where)
    pairs = pairs_of(comparison)
    if not pairs:
        raise ConfigError(f"{where}: a pair needs two replies with different ranks, got the ranks {comparison.ranks}.")
    return pairs


def decided_pairs(ranks: Sequence[float]) -> list[tuple[int, int]]:
    """Return the indices of every two replies with different ranks, the better one first."""
    pairs = itertools.combinations(range(len(ranks)), 2)
    return [(a, b) if ranks[a] < ranks[b] else (b, a) for a, b in pairs if ranks[a] != ranks[b]]


def pairs_of(comparison: Comparison) -> tuple[PreferencePair, ...]:
    """Return a pair for every two replies with different ranks, those with the best replies first.

    The margin of a comparison is that of its only pair; pairs of more than two replies have none.

    Example:
        >>> replies = tuple(({"role": "assistant", "content": text},) for text in "abc")
        >>> ranked = Comparison((), replies, ranks=(1.0, 0.0, 1.0))
        >>> [pair.chosen[0]["content"] + pair.rejected[0]["content"] for pair in pairs_of(ranked)]
        ['ba', 'bc']
    """
    ranked = sorted(zip(comparison.ranks or (), comparison.replies, strict=False), key=lambda entry: entry[0])
    margin = comparison.margin if len(ranked) == 2 else None
    return tuple(
        PreferencePair(comparison.prompt, chosen, rejected, margin, comparison.metadata)
        for (better, chosen), (worse, rejected) in itertools.combinations(ranked, 2)
        if better < worse
    )
