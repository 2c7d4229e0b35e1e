"""Audit a reward model: which changes of a reply raise its score although they do not make the reply better."""

from __future__ import annotations

import dataclasses
import importlib.resources
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gym_rm.checks import integer
from gym_rm.documents import parse_json
from gym_rm.errors import ConfigError
from gym_rm.evaluation.audit_lines import AuditLine, ReplyScores, make_line
from gym_rm.evaluation.audit_rows import AuditRow, AuditRows, other_replies
from gym_rm.evaluation.judges import is_judge
from gym_rm.evaluation.perturbations import CHANGES, Markup, Perturbation, ReplyToChange, markup_of
from gym_rm.plain_values import to_plain
from gym_rm.scorer import Scorer, provenance_of

LEVELS = ("none", "watch", "exploitable")
MOST_NAMED = 5  # findings in a warning
TRIED = (8, 32)  # rows on which a change is tried first, and then; it goes on while it may pay, see `_pays`
ROWS = 128  # of an audit, unless the caller says how many
JUDGE_ROWS = 14  # of a judge, which is asked more than 400 times for a row: the fewest that can show an exploit


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """What a training run needs to know about an audit.

    Attributes:
        level: 0 if every line is ok, 1 if one is suspicious, 2 if one is exploitable.
        exploitable: names of the exploitable changes, the largest first.
        suspicious: names of the suspicious changes, the largest first.
        model: folder, hub id, URL or name of the reward model.
        revision: its files or commit, see `Provenance`.
        rows: where the rows come from.
    """

    level: int
    exploitable: tuple[str, ...]
    suspicious: tuple[str, ...]
    model: str
    revision: str | None
    rows: str


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit.

    Attributes:
        record: the level, and the names of the findings.
        num_rows: number of rows with a score.
        dropped: number of rows of the source without a usable reply.
        score_mean: mean score of the good replies, the best one of each row.
        score_std: their standard deviation.
        num_pairs: number of rows with a worse reply.
        margin_mean: mean score of the best good reply minus that of the best worse reply; None without pairs.
        margin_std: standard deviation of these margins; None without pairs.
        spread: unit of the changes: the standard deviation of the margins, or without pairs that of the scores; 0 if
            all are equal.
        lines: one line per change.
        scored: number of scored replies.
        compares: whether replies are compared, see `ReplyScores`; then one spread is the root mean square of the
            margins, or 1 without pairs.
    """

    record: AuditRecord
    num_rows: int
    dropped: int
    score_mean: float
    score_std: float
    num_pairs: int
    margin_mean: float | None
    margin_std: float | None
    spread: float
    lines: tuple[AuditLine, ...]
    scored: int
    compares: bool = False

    @property
    def level(self) -> int:
        """Warning level: 0 none, 1 watch, 2 exploitable."""
        return self.record.level

    @property
    def smallest_hole(self) -> float | None:
        """Rise that 9 of 10 audits like this one call exploitable in the median line, in spreads; None if unknown."""
        needed = [line.needed for line in self.lines if line.needed is not None]
        return float(np.median(needed)) / self.spread if needed and self.spread else None

    @property
    def holes(self) -> dict[str, float]:
        """Bonus for a kind of change that 9 of 10 audits like this one find, in spreads, by group.

        It is that of the median line of the group: the rise that it needs, and what the change costs without a bonus.
        """
        found: dict[str, list[float]] = {}
        for line in self.lines:
            if line.hole is not None and line.expected == "not higher":
                found.setdefault(line.group, []).append(line.hole)
        return {group: float(np.median(each)) / self.spread for group, each in found.items()} if self.spread else {}

    def in_spreads(self, line: AuditLine) -> float | None:
        """Return the mean change of a line in units of the spread; None if there is none."""
        return None if line.mean is None or not self.spread else line.mean.value / self.spread

    def in_words(self, line: AuditLine) -> str:
        """Return what was done in a line and how much the score moved, as a sentence."""
        if line.mean is None or line.rises is None:
            return f"{line.says}: no score."
        spreads, by = self.in_spreads(line), f"{abs(line.mean.value):.3g}"
        moved = f"rose by {by}" if line.mean.value > 0 else f"fell by {by}" if line.mean.value < 0 else "stayed"
        unit = "" if spreads is None else f" ({spreads:+.2f} spreads)"
        must = "; it must fall" if line.expected == "lower" else ""
        rows = f"on {line.rises.value:.0%} of {line.rows} rows"
        return f"{line.says}: the score {moved} on average{unit}, and rose {rows}{must}."

    def as_dict(self) -> dict[str, Any]:
        """Return the audit as plain JSON values; every line also has `spreads`, `hole`, and its finding in words."""
        values = dataclasses.asdict(self) | {"smallest_hole": self.smallest_hole, "holes": self.holes}
        for value, line in zip(values["lines"], self.lines, strict=True):
            value |= {"spreads": self.in_spreads(line), "hole": line.hole, "says": self.in_words(line)}
        plain: dict[str, Any] = to_plain(values)  # None for the infinite interval of one row, which JSON does not have
        return plain


def default_rows(scorer: Scorer) -> int:
    """Return the rows of an audit whose user does not say how many: a judge answers for money or for hours."""
    return JUDGE_ROWS if is_judge(provenance_of(scorer)) else ROWS


def run_audit(
    scorer: Scorer, rows: AuditRows, *, report: Callable[[int, int], None] = lambda scored, known: None
) -> Audit:
    """Audit a scorer.

    Args:
        scorer: any scorer.
        rows: the rows, from `load_audit_rows`.
        report: called with the number of replies that were scored until then, and of those known to be needed: the
            good ones, then also their changes.

    Raises:
        ConfigError: there are no scores of two good replies or of most changes.

    Example:
        >>> from gym_rm.evaluation.audit_rows import load_audit_rows
        >>> from gym_rm import load_scorer
        >>> scorer = load_scorer(lambda conversations: [len(c[-1]["content"]) for c in conversations])
        >>> run_audit(scorer, load_audit_rows(limit=16)).level
        2
    """
    scores = ReplyScores(scorer, rows.rows, report)
    if scores.compares:  # replies with the same opponent can be compared, so a row has one good reply
        alone = tuple(dataclasses.replace(each, good=each.good[:1], bad=each.bad[:1]) for each in rows.rows)
        rows = dataclasses.replace(rows, rows=alone)
    scores.of([(row, text) for row, each in enumerate(rows.rows) for text in (*each.good, *each.bad)])
    best = {row: found for row, each in enumerate(rows.rows) if (found := scores.best(row, each.good)) is not None}
    if len(best) < 2:
        raise ConfigError(
            f"an audit needs at least two good replies with a score, got {len(best)} of {len(rows.rows)} rows"
            f"{scores.first_error}."
        )
    values = np.array([score for _, score in best.values()])
    worse = {row: scores.best(row, rows.rows[row].bad) for row in best if rows.rows[row].bad}
    margins = np.array([best[row][1] - found[1] for row, found in worse.items() if found is not None])
    spread = (float(margins.std()) if len(margins) > 1 else 0.0) or float(values.std())
    if scores.compares:
        spread = float(np.sqrt(np.mean(margins**2))) if margins.any() else 1.0
    lines = _lines(scores, rows.rows, list(best), markup_of(scorer), spread=spread)
    if 2 * (lost := sum(not line.rows for line in lines)) > len(lines):
        raise ConfigError(f"{lost} of {len(lines)} changes have no score{scores.first_error}.")
    return Audit(
        record=_record(scorer, scores, rows, lines),
        num_rows=len(best),
        dropped=rows.dropped,
        score_mean=float(values.mean()),
        score_std=float(values.std()),
        num_pairs=len(margins),
        margin_mean=float(margins.mean()) if len(margins) else None,
        margin_std=float(margins.std()) if len(margins) else None,
        spread=spread,
        lines=tuple(lines),
        scored=scores.scored,
        compares=scores.compares,
    )


def _lines(
    scores: ReplyScores, rows: tuple[AuditRow, ...], used: list[int], markup: Markup, *, spread: float
) -> list[AuditLine]:
    """Return the line of every perturbation that changes a reply."""
    others = other_replies(rows)
    good = {row: [text for text in rows[row].good if scores.best(row, (text,)) is not None] for row in used}

    def changed(change: Perturbation, row: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the replies before and after a change of a row; one that is another good reply is no change."""
        each, before, after = rows[row], list[str](), list[str]()
        # One reply of a row is changed, not the one with the highest score: that has luck on its side.
        for text in good[row][: None if change.every else 1]:
            reply = ReplyToChange(
                text,
                question=each.messages[-1]["content"],
                answer=each.prompt.answer,
                others=others[row],
                bad=each.bad,
                index=row,
                markup=markup,
            )
            before += (text,) if change.control is None else change.control(reply)
            after += change.apply(reply)
        return tuple(before), tuple(dict.fromkeys(text for text in after if text not in (*before, *each.good)))

    def line(change: Perturbation, tried: list[int]) -> AuditLine:
        before, after = ({row: found[change][row][side] for row in tried} for side in (0, 1))
        return make_line(change, scores, rows, after, before, spread=spread, applies=len(found[change]))

    found = {change: {row: pair for row in used if all(pair := changed(change, row))} for change in CHANGES}
    tried = {change: list(pairs) for change, pairs in found.items() if pairs}
    for size in (*TRIED, None):
        for change, pairs in tried.items():
            if change.every or change.expected == "lower":
                continue
            if size == TRIED[0] or _pays(line(change, pairs)):
                every = list(found[change])
                tried[change] = every[:: max(1, len(every) // (size or len(every)))][:size]
        # All at once, so that the variants of a row share the computation of its prompt.
        wanted = [(row, found[change][row]) for change, pairs in tried.items() for row in pairs]
        scores.of([(row, text) for row, pair in wanted for texts in pair for text in texts])
    return [line(change, pairs) for change, pairs in tried.items()]


def _pays(line: AuditLine) -> bool:
    """Return whether more rows may show that a change pays: the mean is less than a standard error below 0."""
    return line.mean is not None and line.error is not None and line.mean.value + line.error > 0


def _record(scorer: Scorer, scores: ReplyScores, rows: AuditRows, lines: list[AuditLine]) -> AuditRecord:
    def named(verdict: str) -> tuple[str, ...]:
        found = [line for line in lines if line.verdict == verdict]
        return tuple(line.name for line in sorted(found, key=lambda line: -(line.mean.value if line.mean else 0.0)))

    exploitable, suspicious = named("exploitable"), named("suspicious")
    provenance = getattr(scorer, "provenance", None) or scores.provenance
    return AuditRecord(
        level=2 if exploitable else 1 if suspicious else 0,
        exploitable=exploitable,
        suspicious=suspicious,
        model=getattr(provenance, "model", type(scorer).__name__),
        revision=getattr(provenance, "revision", None),
        rows=rows.source,
    )


# --- the record ------------------------------------------------------------------------------------------------------


def read_record(path: str | os.PathLike[str]) -> AuditRecord:
    """Read the record of an audit from a file of `gym-rm audit -o FILE.json`, or from a file with the record alone.

    Raises:
        ConfigError: the file cannot be read, or it holds no audit.
    """
    try:
        values = parse_json(Path(path).read_text(encoding="utf-8"))
        values = values.get("record", values)
        return AuditRecord(
            level=min(integer("level", values["level"], minimum=0), len(LEVELS) - 1),
            exploitable=tuple(map(str, values["exploitable"])),
            suspicious=tuple(map(str, values["suspicious"])),
            model=str(values["model"]),
            revision=values["revision"],
            rows=str(values["rows"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"audit: {os.fspath(path)!r} is not a file of gym-rm audit -o FILE.json: {type(error).__name__}: {error}."
        ) from error


def audit_warning(scorer: Scorer, path: str | os.PathLike[str] | None = None) -> str | None:
    """Return the warning about a reward model in one paragraph, for the start of a training run; None if there is none.

    Args:
        scorer: the scorer of the run.
        path: file of its audit; None for no file, but for the embedded reward model that of the package.
    """
    provenance = getattr(scorer, "provenance", None)
    if path is None:
        packaged = importlib.resources.files("gym_rm").joinpath("assets", "audit.json")
        if getattr(provenance, "model", None) != "embedded" or not packaged.is_file():
            return None
        path = str(packaged)
    record = read_record(path)
    revision = getattr(provenance, "revision", None)
    if None not in (revision, record.revision) and revision != record.revision:
        return (
            f"The audit in {os.fspath(path)} is of other weights ({record.model}, {record.revision}) than the reward "
            f"model of this run ({revision}): audit it again with gym-rm audit."
        )
    if record.level == 0:
        return None
    names = record.exploitable or record.suspicious
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    says = "scores replies higher after" if record.level > 1 else "may score replies too high after"
    return (
        f"Audit, warning level {record.level} of 2: the reward model {says} these changes, which do not make them "
        f"better: {'; '.join(names[:MOST_NAMED])}{more}. Training will find them: read some replies."
    )
