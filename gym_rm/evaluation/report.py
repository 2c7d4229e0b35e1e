"""Everything that an evaluation found out about one set of comparisons, and what it means in words."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from gym_rm.data.comparisons import ComparisonSet
from gym_rm.errors import ConfigError
from gym_rm.evaluation.best_of_n import BestOfN, best_of_n
from gym_rm.evaluation.bootstrap import Interval
from gym_rm.evaluation.compare import ModelComparison, compare_models
from gym_rm.evaluation.preferences import PreferenceReport, evaluate_preferences
from gym_rm.evaluation.scored import ScoredComparisons
from gym_rm.plain_values import to_plain

MISCALIBRATED = 0.1  # expected calibration error from which on a note says so
MANY_TIES = 0.05  # share of equal rewards from which on a note says so
NUM_WORST = 10
WRONG_PAIR = {"row": "rows", "first": "first", "second": "second", "margin": "margins"}  # and their columns


@dataclass(frozen=True, slots=True, eq=False)
class ModelEvaluation:
    """Results of one model on a set: its rows with their rewards, the agreement, and curves over n if asked for."""

    scored: ScoredComparisons
    preferences: PreferenceReport
    best_of_n: BestOfN | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SetEvaluation:
    """Results of one set of comparisons.

    Attributes:
        name: name of the set.
        num_dropped: number of rows that the reader could not use.
        models: results of the model, and of the other one if two are compared.
        comparison: the two models on the same rows.
    """

    name: str
    num_dropped: int
    models: tuple[ModelEvaluation, ...]
    comparison: ModelComparison | None = None

    @property
    def first(self) -> ModelEvaluation:
        """Results of the model that is evaluated."""
        return self.models[0]

    @property
    def curves(self) -> list[BestOfN]:
        """Curves over n of each model, if asked for."""
        return [each.best_of_n for each in self.models if each.best_of_n is not None]

    def worst(self, limit: int = NUM_WORST) -> list[dict[str, Any]]:
        """Return `where`, `row`, `first`, `second` and `margin` of the pairs with the most negative margins."""
        pairs, found = self.first.preferences.pairs, []
        for i in np.argsort(pairs.margins, kind="stable")[:limit]:
            if pairs.margins[i] < 0:
                pair = {name: getattr(pairs, of)[i].item() for name, of in WRONG_PAIR.items()}
                found.append({"where": self.first.scored.comparisons[pair["row"]].where, **pair})
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the results as plain values for JSON, without the texts of the rows."""
        values: dict[str, Any] = {"name": self.name, "num_dropped": self.num_dropped}
        for each, key, prefix in zip(self.models, ("model", "against"), ("", "against_"), strict=False):
            values |= {
                key: each.scored.model,
                f"{prefix}provenance": each.scored.provenance,
                f"{prefix}preferences": _plain(each.preferences),
                f"{prefix}best_of_n": _plain(each.best_of_n),
            }
        values |= {} if self.comparison is None else {"comparison": _plain(self.comparison)}
        return to_plain({**values, "worst": self.worst(), "notes": notes(self)})  # type: ignore[no-any-return]


def evaluate_set(rows: ComparisonSet, *models: ScoredComparisons, gold: str | None = None) -> SetEvaluation:
    """Evaluate one model, or two, on one set.

    Args:
        rows: the set.
        *models: its comparisons with the rewards of the model, and with those of another one.
        gold: name of the rating that best-of-n counts, such as `correct`.

    Raises:
        ConfigError: the set has neither a preference nor the rating `gold`, or there is no such rating.
    """
    scored = models[0].comparisons
    if gold is None and not any(each.ranks is not None and len(set(each.ranks)) > 1 for each in scored):
        ties = sum(each.is_tie for each in scored)
        known = sorted({name for each in scored for name in each.scores})
        raise ConfigError(
            f"{rows.name!r} has no preference: {ties} of its {len(scored)} rows are ties, the others have no ranks. "
            f"Expected a row with a better and a worse reply, or best-of-n by one of the ratings {known}."
        )
    found = tuple(
        ModelEvaluation(each, evaluate_preferences(each), None if gold is None else best_of_n(each, gold=gold))
        for each in models
    )
    return SetEvaluation(
        name=rows.name,
        num_dropped=len(rows.dropped),
        models=found,
        comparison=None if len(models) == 1 else compare_models(*models, gold=gold),
    )


def notes(evaluation: SetEvaluation) -> list[str]:
    """Return sentences about what a reader should not miss."""
    found = evaluation.first.preferences
    sentences = [*_about_rows(evaluation), *_about_accuracy(found), *map(_about_picking, evaluation.curves[:1])]
    names = [each.scored.model for each in evaluation.models]
    for name, each in zip(names, evaluation.models, strict=True):
        said = each.preferences.judge.notes() if each.preferences.judge is not None else []
        sentences += [f"{name}: {note}" if len(names) > 1 else note for note in said]
    if evaluation.comparison is not None:
        sentences.append(verdict(evaluation.comparison, (names[0], names[1])))
        picks = evaluation.comparison.best_of_n
        if picks is not None:
            words = "do not differ clearly" if picks.low <= 0 <= picks.high else "differ"
            sentences.append(f"The picks of the two models {words}: {evaluation.curves[0].gold} by {_signed(picks)}.")
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
    found, sentences = evaluation.first.preferences, []
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
