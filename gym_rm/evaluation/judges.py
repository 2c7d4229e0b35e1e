"""What a judge is worth before it rewards anything: refusals, place bias, agreement of its samples, and its cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_rm.evaluation.bootstrap import Interval, mean_intervals, widened, wilson_interval
from gym_rm.types import Provenance

MANY_REFUSALS = 0.03  # share of questions from which on a note says so
PLACE_BIAS = 0.05  # distance of the share of the first place from one half
FEW_KEPT = 0.8  # share of comparisons that keep their verdict
_MEANS = ("disagreement", "position_consistent", "prefers_first", "verdict_mass")
_TOTALS = ("judge_questions", "judge_answers", "judge_unread", "judge_tokens")


@dataclass(frozen=True, slots=True)
class JudgeRecord:
    """The infos of `JudgeScorer` for one comparison: sums of what its replies cost, means, the first `judge_lead`.
    `seconds` is its share in the time of the call, by the number of questions. NaN is unknown.
    """

    judge_questions: float
    judge_answers: float = math.nan
    judge_unread: float = math.nan
    judge_tokens: float = math.nan
    disagreement: float = math.nan
    position_consistent: float = math.nan
    prefers_first: float = math.nan
    verdict_mass: float = math.nan
    seconds: float = math.nan
    judge_lead: float = math.nan

    @classmethod
    def of(cls, infos: Mapping[str, NDArray[Any]], rows: slice, *, seconds: float) -> JudgeRecord | None:
        """Return the record of some rows of a call that took these seconds; None if no judge was asked."""
        found: dict[str, list[NDArray[np.float64]]] = {}
        for key, info in infos.items():  # what was asked is also counted in the parts of a combined scorer
            if key in _MEANS or key.rpartition("/")[2] in _TOTALS:
                found.setdefault(key.rpartition("/")[2], []).append(np.asarray(info, dtype=np.float64))
        if "judge_questions" not in found:
            return None
        values = {"judge_questions": 0.0}
        for name, columns in found.items():
            known = [value for column in columns for value in column[rows].tolist() if math.isfinite(value)]
            if known:
                values[name] = sum(known) / (len(known) if name in _MEANS else 1)
        if "judge_lead" in infos:
            values["judge_lead"] = float(infos["judge_lead"][rows][0])
        share = values["judge_questions"] / max(1.0, np.nansum(found["judge_questions"]))
        return cls(**values, seconds=seconds * share)


@dataclass(frozen=True, slots=True)
class JudgeReport:
    """What a judge is worth, from M comparisons. A value is None if the judge's scores do not say it.

    Attributes:
        num_questions: number of questions.
        refused: share of the questions without a verdict in the end, with a Wilson interval.
        prefers_first: share of the decisive verdicts for the reply shown first; the interval draws comparisons.
        position_consistent: share of the comparisons of two replies that kept their verdict in the other order.
        verdict_mass: mean probability of all verdicts, of a judge that decides by their probabilities.
        disagreement: mean standard deviation of the samples of a question; None for single samples.
        answers_per_verdict: all answers by the verdicts; 1 if the first answer to each question had one.
        tokens_per_verdict: tokens of questions and answers.
        seconds_per_verdict: with the parallel requests of this evaluation.
    """

    num_questions: int
    refused: Interval
    prefers_first: Interval | None
    position_consistent: Interval | None
    verdict_mass: Interval | None
    disagreement: float | None
    answers_per_verdict: float | None
    tokens_per_verdict: float | None
    seconds_per_verdict: float | None

    def notes(self) -> list[str]:
        """Return a sentence for everything that is bad."""
        first, kept, sentences = self.prefers_first, self.position_consistent, []
        if self.refused.value > MANY_REFUSALS:
            sentences.append(f"It gave no verdict on {self.refused.value:.1%} of {self.num_questions:,} questions.")
        if first is not None and abs(first.value - 0.5) > PLACE_BIAS and not first.low <= 0.5 <= first.high:
            sentences.append(f"{first.value:.0%} of its choices are the reply that it was shown first.")
        if kept is not None and kept.value < FEW_KEPT:
            sentences.append(f"Only {kept.value:.0%} of its comparisons keep their verdict in the other order.")
        return sentences


def judge_report(records: Sequence[JudgeRecord | None], *, samples: int | None) -> JudgeReport | None:
    """Return what a judge is worth, from the records of M comparisons; None if nothing was asked.

    `samples` is the number of samples of a question, None if it is not known.
    """
    plain = [dataclasses.astuple(each) for each in records if each is not None]
    names = [each.name for each in dataclasses.fields(JudgeRecord)]
    columns = dict(zip(names, np.array(plain, dtype=np.float64).reshape(-1, len(names)).T, strict=True))
    asked, unread = columns["judge_questions"], np.nan_to_num(columns["judge_unread"])
    if (total := round(asked.sum())) < 1:
        return None

    def interval(name: str) -> Interval | None:
        """Return the mean over verdicts."""
        known = np.isfinite(columns[name])
        weights = ((asked - unread) * known)[:, None]
        values, groups = np.where(known, columns[name], 0.0), np.arange(len(asked))
        (found,) = mean_intervals(values, weights, groups)
        return None if found is None else widened(found, int(known.sum()))

    def per_verdict(name: str) -> float | None:
        known = np.isfinite(columns[name])
        verdicts = float((asked - unread)[known].sum())
        return float(columns[name][known].sum()) / verdicts if verdicts else None

    noise = None if samples == 1 else interval("disagreement")
    return JudgeReport(
        num_questions=total,
        refused=wilson_interval(float(unread.sum() / asked.sum()), total),
        prefers_first=interval("prefers_first"),
        position_consistent=interval("position_consistent"),
        verdict_mass=interval("verdict_mass"),
        disagreement=None if noise is None else noise.value,
        answers_per_verdict=per_verdict("judge_answers"),
        tokens_per_verdict=per_verdict("judge_tokens"),
        seconds_per_verdict=per_verdict("seconds"),
    )


def is_judge(provenance: Provenance | None) -> bool:
    """Return whether a scorer asks a judge."""
    return provenance is not None and "mode" in provenance.settings


def compares_groups(provenance: Provenance | None) -> bool:
    """Return whether a scorer compares the replies of a group with each other, so that one alone has no reward."""
    settings = {} if provenance is None else provenance.settings
    return settings.get("mode") == "listwise" or settings.get("comparisons", "reference") != "reference"
