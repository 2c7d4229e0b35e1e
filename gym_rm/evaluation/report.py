"""Everything that an evaluation found out about one set of comparisons, and what it means in words."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from gym_rm.data.comparisons import ComparisonSet
from gym_rm.errors import ConfigError
from gym_rm.evaluation.best_of_n import BestOfN, best_of_n
from gym_rm.evaluation.bootstrap import DEFAULT_RESAMPLING, Interval, Resampling
from gym_rm.evaluation.compare import ModelComparison, compare_models
from gym_rm.evaluation.preferences import PreferenceReport, evaluate_preferences
from gym_rm.evaluation.scored import ScoredComparisons
from gym_rm.plain_values import to_plain

MISCALIBRATED = 0.1  # expected calibration error from which on a note says so
MANY_TIES = 0.05  # share of equal rewards from which on a note says so
NUM_WORST = 10
WRONG_PAIR = {"row": "rows", "first": "first", "second": "second", "margin": "margins"}  # and their columns


@dataclass(frozen=True, slots=True, eq=False)
class SetEvaluation:
    """Results of one set of comparisons.

    Attributes:
        name: name of the set.
        scored: its rows with the rewards of the model.
        num_dropped: number of rows that the reader could not use.
        preferences: agreement with the preferences.
        best_of_n: curves over n, if asked for.
        against: rows with the rewards of the other model.
        against_preferences: agreement of the other model.
        against_best_of_n: curves of the other model.
        comparison: the two models on the same rows.
    """

    name: str
    scored: ScoredComparisons
    num_dropped: int
    preferences: PreferenceReport
    best_of_n: BestOfN | None = None
    against: ScoredComparisons | None = None
    against_preferences: PreferenceReport | None = None
    against_best_of_n: BestOfN | None = None
    comparison: ModelComparison | None = None

    def worst(self, limit: int = NUM_WORST) -> list[dict[str, Any]]:
        """Return `where`, `row`, `first`, `second` and `margin` of the pairs with the most negative margins."""
        pairs, found = self.preferences.pairs, []
        for i in np.argsort(pairs.margins, kind="stable")[:limit]:
            if pairs.margins[i] < 0:
                pair = {name: getattr(pairs, of)[i].item() for name, of in WRONG_PAIR.items()}
                found.append({"where": self.scored.comparisons[pair["row"]].where, **pair})
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the results as plain values for JSON, without the texts of the rows."""
        values = {
            "name": self.name,
            "model": self.scored.model,
            "provenance": self.scored.provenance,
            "num_dropped": self.num_dropped,
            "preferences": _plain(self.preferences),
            "best_of_n": _plain(self.best_of_n),
            "worst": self.worst(),
            "notes": notes(self),
        }
        if self.against is not None:
            values |= {
                "against": self.against.model,
                "against_provenance": self.against.provenance,
                "against_preferences": _plain(self.against_preferences),
                "against_best_of_n": _plain(self.against_best_of_n),
                "comparison": _plain(self.comparison),
            }
        return to_plain(values)  # type: ignore[no-any-return]


def evaluate_set(
    rows: ComparisonSet,
    scored: ScoredComparisons,
    *,
    against: ScoredComparisons | None = None,
    gold: str | None = None,
    resampling: Resampling = DEFAULT_RESAMPLING,
) -> SetEvaluation:
    """Evaluate one model, or two, on one set.

    Args:
        rows: the set.
        scored: its comparisons with the rewards of the model.
        against: the same with the rewards of another model.
        gold: name of the rating that best-of-n counts, such as `correct`.
        resampling: number and seed of the bootstrap samples.

    Raises:
        ConfigError: the set has neither a preference nor the rating `gold`, or there is no such rating.
    """
    if gold is None and not any(each.ranks is not None and len(set(each.ranks)) > 1 for each in scored.comparisons):
        ties = sum(each.is_tie for each in scored.comparisons)
        known = sorted({name for each in scored.comparisons for name in each.scores})
        raise ConfigError(
            f"{rows.name!r} has no preference: {ties} of its {len(scored.comparisons)} rows are ties, the others have "
            f"no ranks. Expected a row with a better and a worse reply, or best-of-n by one of the ratings {known}."
        )
    both = [scored] if against is None else [scored, against]
    preferences = [evaluate_preferences(each, resampling=resampling) for each in both]
    curves = [None if gold is None else best_of_n(each, gold=gold, resampling=resampling) for each in both]
    comparison = None if against is None else compare_models(scored, against, gold=gold, resampling=resampling)
    return SetEvaluation(
        name=rows.name,
        scored=scored,
        num_dropped=len(rows.dropped),
        preferences=preferences[0],
        best_of_n=curves[0],
        against=against,
        against_preferences=None if against is None else preferences[1],
        against_best_of_n=None if against is None else curves[1],
        comparison=comparison,
    )


def notes(evaluation: SetEvaluation) -> list[str]:
    """Return sentences about what a reader should not miss."""
    found = evaluation.preferences
    sentences = [*_about_rows(evaluation), *_about_accuracy(found)]
    curve = evaluation.best_of_n
    if curve is not None:
        sentences.append(_about_picking(curve))
    for scored, each in ((evaluation.scored, found), (evaluation.against, evaluation.against_preferences)):
        name = f"{scored.model}: " if scored is not None and evaluation.against is not None else ""
        sentences += [name + note for note in each.judge.notes()] if each is not None and each.judge is not None else []
    if evaluation.comparison is not None and evaluation.against is not None:
        names = (evaluation.scored.model, evaluation.against.model)
        sentences.append(verdict(evaluation.comparison, names))
        picks = evaluation.comparison.best_of_n
        if picks is not None and curve is not None:
            words = "do not differ clearly" if picks.low <= 0 <= picks.high else "differ"
            sentences.append(f"The picks of the two models {words}: {curve.gold} by {_signed(picks)}.")
    return sentences


def verdict(comparison: ModelComparison, names: tuple[str, str]) -> str:
    """Return one sentence: which of the two models is better on these rows, if either."""
    difference = comparison.difference
    numbers = f"{_signed(difference)} on {comparison.num_pairs} pairs, McNemar p = {comparison.mcnemar:.2g}"
    if comparison.num_prompts < comparison.num_pairs:
        numbers += f" (which takes the pairs of {comparison.num_prompts} prompts as independent; the interval does not)"
    if difference.low > 0 or difference.high < 0:
        better, other = names if difference.low > 0 else names[::-1]
        return f"{better} is more accurate than {other}: the accuracy differs by {numbers}."
    return f"These rows do not show which model is more accurate: the accuracy differs by {numbers}."


def _about_picking(curve: BestOfN) -> str:
    way = curve.recovered
    if way is None:
        return f"All replies to a prompt have the same grade {curve.gold!r}, so no pick is better than another."
    versus = "better than" if way.low > 0 else "worse than" if way.high < 0 else "not clearly different from"
    absent = curve.num_failed + curve.num_small
    left_out = f" {absent} prompts with missing rewards or fewer replies were left out." if absent else ""
    return (
        f"The best of {curve.ns[-1]} replies by reward has {curve.gold} = {curve.picked[-1].value:.3f}, {versus} a "
        f"random reply ({curve.random:.3f}): {way.value:.0%} [{way.low:.0%}, {way.high:.0%}] of the way to a perfect "
        f"pick ({curve.oracle[-1]:.3f}).{left_out}"
    )


def _about_rows(evaluation: SetEvaluation) -> list[str]:
    found, sentences = evaluation.preferences, []
    if evaluation.num_dropped:
        sentences.append(f"{evaluation.num_dropped} rows could not be used and were left out.")
    if found.num_failed:
        reason, count = found.errors[0]
        sentences.append(
            f"{found.num_failed} of {found.num_comparisons} rows lack a reward, and {found.num_pairs_left_out} pairs "
            f"were left out. The most frequent reason ({count} replies): {reason}"
        )
    if found.num_truncated:
        sentences.append(f"{found.num_truncated} replies were cut to the maximum length; their rewards may be wrong.")
    return sentences


def _about_accuracy(found: PreferenceReport) -> list[str]:
    metrics, sentences = found.metrics, []
    if found.accuracy is None:
        return []
    if metrics.ties is not None and metrics.ties > MANY_TIES:
        sentences.append(f"{metrics.ties:.0%} of the pairs have equal rewards. They count as wrong.")
    elif found.accuracy.low <= 0.5 <= found.accuracy.high:
        sentences.append("The interval of the accuracy contains 0.5: these rows do not tell the model from a coin.")
    elif found.accuracy.high < 0.5:
        sentences.append("The accuracy is below 0.5: the model prefers the replies that the data rejects.")
    shorter, longer = found.chosen_shorter, found.chosen_longer
    if shorter and longer and _apart(shorter.accuracy, longer.accuracy):
        likes = "long" if longer.accuracy.value > shorter.accuracy.value else "short"
        sentences.append(
            f"It seems to reward {likes} replies: it is right in {longer.accuracy.value:.1%} of the pairs whose better "
            f"reply is the longer one, and in {shorter.accuracy.value:.1%} of the others."
        )
    if metrics.calibration_error is not None and metrics.calibration_error > MISCALIBRATED:
        bins = found.calibration
        direction = np.average(bins.stated - bins.observed, weights=bins.num_pairs)
        words = "more certain" if direction > 0 else "less certain"
        sentences.append(
            f"Its margins are {words} than right (calibration error {metrics.calibration_error:.2f}): do not read "
            "sigmoid(margin) as a probability."
        )
    return sentences


def _signed(interval: Interval) -> str:
    return f"{interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def _apart(one: Interval, other: Interval) -> bool:
    return one.low > other.high or other.low > one.high


def _plain(record: Any) -> Any:
    """Return a record as a dict, without the table of pairs."""
    if record is None:
        return None
    return {name: value for name, value in dataclasses.asdict(record).items() if name != "pairs"}
