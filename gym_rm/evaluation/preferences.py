"""Agreement of a reward model with a file of preferences: accuracy with intervals, ties, calibration, length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gym_rm.evaluation.bootstrap import Interval, mean_intervals, widened
from gym_rm.evaluation.judges import JudgeReport
from gym_rm.evaluation.pairs import CalibrationBins, PairMetrics, calibration_bins, pair_metrics
from gym_rm.evaluation.scored import PairTable, ScoredComparisons, pair_table


@dataclass(frozen=True, slots=True)
class Group:
    """Accuracy of the pairs that have something in common, such as a source."""

    name: str
    num_pairs: int
    accuracy: Interval


@dataclass(frozen=True, slots=True, eq=False)
class PreferenceReport:
    """How often, and how surely, a reward model prefers the reply that the data prefers.

    Attributes:
        num_comparisons: number of rows.
        num_unranked: rows without ranks.
        num_ties: rows whose replies all have the same rank; they are in no other number.
        num_failed: rows with at least one reply without a reward. Pairs with such a reply are left out, not wrong.
        num_pairs_left_out: number of these pairs.
        num_truncated: number of replies of which tokens were cut.
        errors: the reasons of missing rewards, and how often each occurs.
        metrics: metrics of all pairs; lengths are characters.
        accuracy: accuracy with its interval; prompts are drawn, with all of their pairs.
        chosen_shorter: pairs whose better reply is the shorter one.
        chosen_longer: pairs whose better reply is the longer one.
        by_source: pairs by source.
        calibration: stated and observed probabilities.
        pairs: the pairs.
        judge: what the model is worth as a judge; None if it is none.
    """

    num_comparisons: int
    num_unranked: int
    num_ties: int
    num_failed: int
    num_pairs_left_out: int
    num_truncated: int
    errors: tuple[tuple[str, int], ...]
    metrics: PairMetrics
    accuracy: Interval | None
    chosen_shorter: Group | None
    chosen_longer: Group | None
    by_source: tuple[Group, ...]
    calibration: CalibrationBins
    pairs: PairTable
    judge: JudgeReport | None


def evaluate_preferences(scored: ScoredComparisons) -> PreferenceReport:
    """Compare rewards with preferences.

    Accuracy is the share of the pairs whose better reply has the strictly higher reward. A comparison of K ranked
    replies counts as all of its pairs.

    Args:
        scored: comparisons with their rewards.

    Example:
        >>> replies = tuple(({"role": "assistant", "content": text},) for text in ("4", "5"))
        >>> from gym_rm.evaluation.scored import RowScores
        >>> from gym_rm.types import Comparison
        >>> row = Comparison(({"role": "user", "content": "2 + 2?"},), replies, ranks=(0, 1))
        >>> scored = ScoredComparisons((row,), (RowScores((1.5, 0.5), (None, None)),))
        >>> evaluate_preferences(scored).accuracy.value
        1.0
    """
    pairs = pair_table(scored)
    rewards = [row.rewards for row in scored.scores]
    chosen, rejected = (
        np.array([rewards[row][reply] for row, reply in zip(pairs.rows, replies, strict=True)], dtype=np.float64)
        for replies in (pairs.first, pairs.second)
    )
    # Only the difference of the lengths matters.
    metrics = pair_metrics(
        chosen, rejected, chosen_tokens=pairs.length_differences, rejected_tokens=np.zeros(chosen.size)
    )
    masks = {
        "all": np.ones(chosen.size, dtype=np.bool_),
        "chosen shorter": pairs.length_differences < 0,
        "chosen longer": pairs.length_differences > 0,
    }
    whole = {group.name: group for group in _groups(masks, pairs)}
    sources = np.array([each.source for each in scored.comparisons], dtype=object)[pairs.rows]
    members = {name or "(no source)": sources == name for name in sorted(set(sources.tolist()))}
    by_source = _groups(members, pairs) if members else []
    return PreferenceReport(
        num_comparisons=len(scored.comparisons),
        num_unranked=sum(each.ranks is None for each in scored.comparisons),
        num_ties=sum(each.is_tie for each in scored.comparisons),
        num_failed=sum(any(row.errors) for row in scored.scores),
        num_pairs_left_out=pairs.num_left_out,
        num_truncated=sum(row.truncated for row in scored.scores),
        errors=tuple(scored.errors.most_common()),
        metrics=metrics,
        accuracy=whole["all"].accuracy if whole else None,
        chosen_shorter=whole.get("chosen shorter"),
        chosen_longer=whole.get("chosen longer"),
        by_source=tuple(by_source),
        calibration=calibration_bins(pairs.margins),
        pairs=pairs,
        judge=scored.judge(),
    )


def _groups(masks: Mapping[str, NDArray[np.bool_]], pairs: PairTable) -> list[Group]:
    """Return the accuracy of each group that has pairs."""
    columns = np.stack(list(masks.values()), axis=1).astype(np.float64)
    right = (pairs.margins > 0).astype(np.float64)
    intervals = mean_intervals(right, columns, pairs.prompts)
    groups = []
    for (name, mask), interval in zip(masks.items(), intervals, strict=True):
        if interval is not None:
            num_prompts = np.unique(pairs.prompts[mask]).size
            groups.append(Group(name, int(mask.sum()), widened(interval, num_prompts)))
    return groups
