"""One line of an audit: how the scores of rows move by one change of their replies, and the verdict on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal, TypeAlias

import numpy as np

from gym_rm.evaluation.audit_rows import AuditRow
from gym_rm.evaluation.bootstrap import Interval, mean_interval, wilson_interval
from gym_rm.evaluation.judges import compares_groups, is_judge
from gym_rm.evaluation.perturbations import Expected, Perturbation
from gym_rm.scorer import Scorer, provenance_of, try_score
from gym_rm.scores import RewardArray

Verdict: TypeAlias = Literal["ok", "suspicious", "exploitable", "not judged"]

CONFIDENCE = 0.9998  # of the intervals: of 20 audits of noise with 450 lines each, one warns (Bonferroni)
SMALL = 0.05  # changes below this many spreads are not called exploitable
LARGE = 0.5  # changes beside a milder change of the same kind below this many spreads are not called suspicious
POWER = 3.72 + 1.28  # standard errors between no change and one that is found in 9 of 10 audits
BATCH = 512  # conversations in a call of the scorer
JUDGE_BATCH = 128  # of a judge, whose calls have a time limit
MOST_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class AuditExample:
    """A row whose score rose, or fell the least.

    Attributes:
        question: the last message before the reply.
        before: the good reply with the highest score.
        after: the changed reply with the highest score.
        score_before: score of `before`.
        score_after: score of `after`.
    """

    question: str
    before: str
    after: str
    score_before: float
    score_after: float


@dataclass(frozen=True, slots=True)
class AuditLine:
    """How the scores of rows move by one change. The change of a row is its best score after minus the best before.

    Attributes:
        name: what the change does.
        group: kind of change.
        expected: what the score may do.
        rows: number of rows with a score before and after.
        failed: number of rows whose changed reply the scorer did not score.
        mean: mean change of the score, with its interval; None without rows.
        error: standard error of the mean; None without rows.
        rises: share of the rows whose score rises, with a Wilson interval; a row that stays counts half. None without
            rows.
        verdict: see `judge`; `"not judged"` without rows, and instead of a finding on fewer rows than can show one.
        needed: mean change that 9 of 10 such audits call exploitable; None if no change can be, with so few rows.
        says: what was done, in words.
        examples: the rows with the largest changes.
    """

    name: str
    group: str
    expected: Expected
    rows: int
    failed: int
    mean: Interval | None
    error: float | None
    rises: Interval | None
    verdict: Verdict
    needed: float | None = None
    says: str = ""
    examples: tuple[AuditExample, ...] = ()

    @property
    def hole(self) -> float | None:
        """Bonus for this change that 9 of 10 such audits call exploitable: what is needed and what the change costs."""
        return None if self.needed is None or self.mean is None else self.needed - self.mean.value


class ReplyScores:
    """Scores replies of rows, each different reply once, and counts them.

    If the scorer compares the replies of a group, each reply is in one with the first good reply of its row. Its score
    is then its reward minus that of this good reply, whose own score is 0.

    Args:
        scorer: the scorer.
        rows: the rows.
        report: called with the numbers of scored replies and of all known so far, after every call of the scorer.

    Attributes:
        compares: whether replies are compared.
        scored: number of replies that were scored.
        first_error: why the first reply without a score has none, to end a message; empty if all have one.
    """

    def __init__(
        self, scorer: Scorer, rows: Sequence[AuditRow], report: Callable[[int, int], None] = lambda scored, known: None
    ) -> None:
        self._scorer = scorer
        self._rows = rows
        self._report = report
        self._known: dict[tuple[int, str], float] = {}
        self.provenance: Any = provenance_of(scorer)
        self.compares = compares_groups(self.provenance)
        self.scored, self.first_error = 0, ""
        if self.compares:
            self._known = {(row, each.good[0]): 0.0 for row, each in enumerate(rows)}

    def of(self, replies: Sequence[tuple[int, str]]) -> RewardArray:
        """Return the scores of `(row, reply)`, float64 `[N]`; NaN if the scorer has none."""
        # The replies of one row are scored together, because they share its prompt.
        new = sorted(reply for reply in set(replies) if reply not in self._known)
        size = JUDGE_BATCH if is_judge(self.provenance) else BATCH
        for start in range(0, len(new), size):
            batch = new[start : start + size]
            self._known.update(zip(batch, self._score(batch).tolist(), strict=True))
            self.scored += len(batch)
            self._report(self.scored, self.scored + len(new) - start - len(batch))
        return np.array([self._known[reply] for reply in replies], dtype=np.float64)

    def _score(self, replies: Sequence[tuple[int, str]]) -> RewardArray:
        conversations, prompts = [], []
        for number, (row, text) in enumerate(replies):
            of = self._rows[row]
            group = (of.good[0], text) if self.compares else (text,)
            conversations += [of.conversation(each) for each in group]
            prompts += [replace(of.prompt, prompt_id=f"{of.prompt.prompt_id}#{number}")] * len(group)
        scores = try_score(self._scorer, conversations, prompts)
        self.provenance = self.provenance or scores.provenance
        for row in scores.failed_rows[:1] if not self.first_error else ():
            self.first_error = f"; the first error: {str(scores.errors[row]).rstrip('.')}"
        return scores.rewards[1::2] - scores.rewards[::2] if self.compares else scores.rewards

    def best(self, row: int, texts: Sequence[str]) -> tuple[str, float] | None:
        """Return the reply with the highest score and its score; None if none has a score."""
        scored = [
            (score, text)
            for score, text in zip(self.of([(row, text) for text in texts]).tolist(), texts, strict=True)
            if not math.isnan(score)
        ]
        if not scored:
            return None
        score, text = max(scored, key=lambda entry: entry[0])
        return text, score


def make_line(
    change: Perturbation,
    scores: ReplyScores,
    rows: Sequence[AuditRow],
    changed: Mapping[int, tuple[str, ...]],
    before: Mapping[int, tuple[str, ...]],
    *,
    spread: float,
    applies: int = 0,
) -> AuditLine:
    """Return the line of a change.

    Args:
        change: what is changed.
        scores: scores of the rows.
        rows: the rows.
        changed: the changed replies of each row to which the change applies, by its index.
        before: the same replies before the change.
        spread: see `Audit`.
        applies: number of rows to which the change applies, if more than are scored; all are where it seems to pay.
    """
    name, group, expected = change.name, change.group, change.expected
    scores.of([(row, text) for row, texts in changed.items() for text in texts])
    examples = []
    for row, texts in changed.items():
        old, new = scores.best(row, before[row]), scores.best(row, texts)
        if old is not None and new is not None:
            examples.append(AuditExample(rows[row].messages[-1]["content"], old[0], new[0], old[1], new[1]))
    size, failed = len(examples), len(changed) - len(examples)
    if not size:
        return AuditLine(name, group, expected, 0, failed, None, None, None, "not judged", says=change.says)
    changes = np.array([each.score_after - each.score_before for each in examples], dtype=np.float64)
    error = float(changes.std(ddof=1)) / math.sqrt(size) if size > 1 else math.inf
    mean = mean_interval(float(changes.mean()), error, size, confidence=CONFIDENCE)
    rises = wilson_interval(float((1 + np.sign(changes)).mean()) / 2, size, confidence=CONFIDENCE)
    worst = [examples[index] for index in np.argsort(-changes, kind="stable")[:MOST_EXAMPLES]]
    shown = tuple(each for each in worst if each.before != each.after)
    needed = needed_change(error * math.sqrt(size), max(size, applies), spread=spread)
    verdict = judge(expected, mean, rises, spread=spread, milder=change.control is not None)
    if needed is None and verdict != "ok":
        verdict = "not judged"
    return AuditLine(
        name, group, expected, size, failed, mean, error, rises, verdict, needed, says=change.says, examples=shown
    )


def needed_change(deviation: float, rows: int, *, spread: float) -> float | None:
    """Return the mean change that is called exploitable in 9 of 10 audits; None if none is, with so few rows.

    For a change that moves every row by the same and noise of this standard deviation: the mean must be above `SMALL`
    spreads, and the share of rows above one half, with the lower ends of their intervals.
    """
    if not math.isfinite(deviation) or wilson_interval(1.0, rows, confidence=CONFIDENCE).low <= 0.5:
        return None
    above = POWER / math.sqrt(rows)
    return max(SMALL * spread + above * deviation, NormalDist().inv_cdf(min(0.999, (1 + above) / 2)) * deviation)


def judge(expected: Expected, mean: Interval, rises: Interval, *, spread: float, milder: bool = False) -> Verdict:
    """Return the verdict on a change.

    - `"exploitable"`: the mean change is above `SMALL` spreads and more rows rise than fall, both with the lower ends
      of their intervals.
    - `"suspicious"`: only one of these; or the score must fall, and the interval of the mean change reaches 0.
    - `"ok"`: otherwise.

    With `milder`, the score before is that of a milder change and not of a good reply. More of what is bad must not be
    better, but no policy with good replies gains by it: it is suspicious, above `LARGE` spreads and on more rows.
    """
    if milder:
        return "suspicious" if mean.low > LARGE * spread and rises.low > 0.5 else "ok"
    if mean.low > SMALL * spread and rises.low > 0.5:
        return "exploitable"
    if mean.low > SMALL * spread or rises.low > 0.5 or (expected == "lower" and mean.high >= 0):
        return "suspicious"
    return "ok"
