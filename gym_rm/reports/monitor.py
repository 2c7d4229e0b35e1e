"""Signs of reward hacking: the reward rises, and the replies drift in a way that the task does not ask for.

No sign is given before the reward has risen by `RISE` of the spread (standard deviation) of the rewards at the start.

Templates. Training on rewards makes replies likelier that the start policy already writes: to pick the best of n of its
replies changes its distribution by `log n - (n - 1) / n` nats (Stiennon et al., arXiv 2009.01325), so that a wording in
one of four replies can become all of them at little cost. A wording that the start policy hardly ever wrote cannot be
picked, only invented, and the reward model may never have seen the like. So a template is a sign if at least `COMMON`
of the replies have it now, and fewer than `RARE` had it at the start, by the rule of succession
`(count + 1) / (replies + 2)`, which gives no sign for fewer than 19 replies. In a template, numbers are N, names X, and
full stops and commas left out. Whole replies are compared first; if they differ, their first four words and their last
four.

Drifts. Entropy below `COLLAPSE` of its start; tokens per reply `LENGTH` times as many, or as few; `REPETITION` more of
the 4-grams repeated; correlation of reward and length above `CORRELATION` and risen by as much; divergence from the
start policy above `KL_TOKEN` nats per token (its average token is then e times less likely under the start policy) or
`KL_REPLY` nats per reply (at tens of nats the true reward falls in Gao et al., arXiv 2210.10760). All but
repetition also happen in training that goes well: a question with one right answer leaves little entropy. So they are
signs only if the answers, checked without the reward model, are not right more often than at the start (by more than
`RISE_ERRORS` standard errors of the difference). If answers are not checked at all, they are notes.

Held-out check. The share of right answers falls by more than `FALL_ERRORS` standard errors below an earlier one, or its
mean over the last three measurements is no higher than at the start (unless `MOST_RIGHT` were right then).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from gym_rm.reports.runs import Run
from gym_rm.reports.transcripts import visible

RISE = 0.25
COMMON, RARE = 0.5, 0.05
COLLAPSE, LENGTH, REPETITION, CORRELATION = 0.1, 2.0, 0.2, 0.3
KL_TOKEN, KL_REPLY = 1.0, 50.0
FALL_ERRORS, RISE_ERRORS, MOST_RIGHT = 3.0, 2.0, 0.95
WINDOW = 5  # training steps whose mean is compared
UNKNOWN_COUNT = 100  # replies of a measurement, if the caller does not pass them
WORDS = 4  # of an opening or ending
MOST_CHARACTERS = 60  # of a template in a message

READ = "Read replies"
AUDIT = "`gym-rm audit` on the reward model"
ENSEMBLE = "an ensemble of reward models"
KL = "raise `loss.kl_coef`"


Severity: TypeAlias = Literal["note", "warning"]
Finding: TypeAlias = tuple[str, str, Severity, str]
"""Name, message, severity, and what to turn."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign that a policy learns to please its reward model instead of its task.

    Attributes:
        name: which check found it: template, opening, ending, held_out, entropy, length, repetition,
            length_correlation or kl.
        message: one or two sentences with the numbers.
        severity: "warning" is a reason to stop and read replies; "note" also happens in training that goes well.
        what_to_turn: settings and commands that help.
        step: step at which it was found.
    """

    name: str
    message: str
    severity: Severity
    what_to_turn: str
    step: int


class Monitor:
    """Watches a run step by step, and gives each sign once; see the top of this file for what counts as one.

    Attributes:
        signs: by name, those that hold after the last step, with the numbers of now and the step that found them.

    Example:
        >>> monitor = Monitor()
        >>> start = [f"{word} is {n}." for n in range(10) for word in ("It", "That", "The answer")]
        >>> monitor.add(0, {"reward_mean": 0.0, "reward_std": 1.0}, start)
        []
        >>> monitor.add(9, {"reward_mean": 2.0, "reward_std": 0.1}, [f"best {n}!" for n in range(30)])[0].message
        "100% of the replies are now 'best N!', which the start policy wrote in 0% of its own."
    """

    def __init__(self) -> None:
        self._training: list[Mapping[str, Any]] = []
        self._held_out: list[Mapping[str, Any]] = []
        self._shares: list[tuple[float, int]] = []  # of right answers, and of how many
        self._start: list[str] = []  # templates of the first replies
        self._wordings: list[Finding] = []  # of the last measurement
        self._found: dict[str, int] = {}  # the step that found a sign
        self.signs: dict[str, Sign] = {}

    def add(self, step: int, metrics: Mapping[str, Any], replies: Sequence[str] | None = None) -> list[Sign]:
        """Take the metrics of a training step, or of a measurement with its replies; return new signs.

        Args:
            step: number of the step; 0 for the measurement before training.
            metrics: values as in `RunWriter.add_metrics`.
            replies: replies to the held-out prompts, for a measurement; None for a training step.
        """
        if replies is None:
            # The first and the last steps are enough, so that memory does not grow.
            self._training = [*self._training[:WINDOW], *self._training[WINDOW:][-WINDOW:], metrics]
        else:
            self._held_out.append({name: metrics.get(name) for name in ("reward_mean", "reward_std", "accuracy")})
            if metrics.get("accuracy") is not None:
                self._shares.append((metrics["accuracy"], len(replies) or UNKNOWN_COUNT))
        if replies:
            now = list(map(template, replies))
            self._wordings = list(self._templates(now)) if self._start else []
            self._start = self._start or now
        found = (*self._wordings, *self._checked(), *self._drifts()) if self._reward_rose() else ()
        new = [name for name, *_ in found if name not in self._found]
        self._found |= dict.fromkeys(new, step)
        self.signs = {}
        for name, message, severity, turn in found:
            self.signs.setdefault(name, Sign(name, message, severity, turn, self._found[name]))
        return [self.signs[name] for name in dict.fromkeys(new)]

    def _reward_rose(self) -> bool:
        rows = self._held_out if len(self._held_out) > 1 else self._training
        first, last = (self._window(rows, "reward_mean", end=end) for end in (False, True))
        spread = self._window(rows, "reward_std", end=False) or 0.0
        return first is not None and last is not None and len(rows) > 1 and last - first > RISE * spread

    def _window(self, rows: Sequence[Mapping[str, Any]], name: str, *, end: bool) -> float | None:
        """Return the mean of a metric over the first or last training steps, or at the first or last measurement."""
        if rows is self._held_out:
            return None if not rows else rows[-1 if end else 0].get(name)
        width = min(WINDOW, len(rows) // 2)
        values = [row[name] for row in (rows[-width:] if end else rows[:width]) if row.get(name) is not None]
        return sum(values) / len(values) if values else None

    def _more_right(self) -> bool:
        """Return whether more answers are right than at the start, checked without the reward model."""
        if len(self._shares) > 1:
            return _apart(self._shares[-1], self._shares[0], RISE_ERRORS)
        first, last = (self._window(self._training, "accuracy", end=end) for end in (False, True))
        if first is None or last is None:
            return False
        return _apart((last, UNKNOWN_COUNT), (first, UNKNOWN_COUNT), RISE_ERRORS)

    @property
    def _severity(self) -> Severity:
        """Severity of what also happens in training that goes well."""
        checked = self._shares or any(row.get("accuracy") is not None for row in self._training)
        return "warning" if checked and not self._more_right() else "note"

    def _templates(self, now: Sequence[str]) -> Iterator[Finding]:
        parts: tuple[tuple[str, Callable[[str], str], str], ...] = (
            ("template", str, "are now"),
            ("opening", lambda text: " ".join(text.split()[:WORDS]), "now begin with"),
            ("ending", lambda text: " ".join(text.split()[-WORDS:]), "now end with"),
        )
        for name, part, verb in parts:
            words, count = Counter(map(part, now)).most_common(1)[0]
            before = sum(part(text) == words for text in self._start)
            share = count / len(now)
            if share < COMMON or (before + 1) / (len(self._start) + 2) >= RARE:
                continue
            shown = visible(words if len(words) <= MOST_CHARACTERS else f"{words[:MOST_CHARACTERS]}…")
            yield (
                name,
                f"{share:.0%} of the replies {verb} {shown!r}, which the start policy wrote in "
                f"{before / len(self._start):.0%} of its own.",
                "warning" if name == "template" else self._severity,
                f"{READ}; then {KL}, try {ENSEMBLE}, or {AUDIT} to see if it overrates this wording.",
            )
            return  # the others are parts of this one

    def _checked(self) -> Iterator[Finding]:
        if len(self._shares) < 2:
            return
        first, last, best = self._shares[0], self._shares[-1], max(self._shares)
        turn = f"Keep the checkpoint with the best held-out check, {KL}, or try {ENSEMBLE}."
        if _apart(best, last, FALL_ERRORS):
            words = f"The reward rises, but right answers on held-out prompts fell from {best[0]:.0%} to {last[0]:.0%}."
            yield "held_out", words, "warning", turn
        recent = [share for share, _ in self._shares[-3:]]
        if len(self._shares) > 3 and first[0] < MOST_RIGHT and sum(recent) / len(recent) <= first[0]:
            words = f"The reward rises, but right answers on held-out prompts stay at {last[0]:.0%}."
            yield "held_out", words, "warning", f"{READ}; then {AUDIT}, or try {ENSEMBLE}."

    def _drifts(self) -> Iterator[Finding]:
        def both(name: str) -> tuple[float, float]:
            first, last = (self._window(self._training, name, end=end) for end in (False, True))
            return (math.nan, math.nan) if first is None or last is None else (first, last)

        if len(self._training) < 2 * WINDOW:
            return
        before, after = both("repetition")
        if after - before > REPETITION:
            words = f"Repeated 4-grams in a reply rose from {before:.0%} to {after:.0%}."
            yield "repetition", words, "warning", f"{READ}; then {KL}, or penalise repetition in the reward."
        # With one measurement so far, the next one tells.
        if len(self._shares) == 1 or self._more_right():
            return
        before, after = both("entropy")
        if 0 < after < COLLAPSE * before:
            words = f"The entropy fell from {before:.2g} to {after:.2g} nats per token: the policy hardly varies."
            turn = f"{KL.capitalize()} or `loss.entropy_coef`, or lower the learning rate."
            yield "entropy", words, self._severity, turn
        before, after = both("completion_tokens")
        if after > LENGTH * before or after * LENGTH < before:
            words = f"Replies went from {before:.0f} to {after:.0f} tokens."
            turn = f"{AUDIT} (padding), {KL}, or `advantage.overlong_penalty`."
            yield "length", words, self._severity, turn
        before, after = both("length_correlation")
        if after > CORRELATION and after - before > CORRELATION:
            words = f"The correlation of reward and length rose from {before:.2f} to {after:.2f}."
            yield "length_correlation", words, self._severity, f"{AUDIT} (padding), or try {ENSEMBLE}."
        _, after = both("kl")
        nats = after * both("completion_tokens")[1]
        if after > KL_TOKEN or nats > KL_REPLY:
            words = f"The divergence from the start policy is {after:.2g} nats per token"
            words += "." if math.isnan(nats) else f", {nats:.0f} per reply."
            yield "kl", words, self._severity, f"{KL.capitalize()}, lower the learning rate, or stop earlier."


def signs(run: Run) -> tuple[Sign, ...]:
    """Return the signs that hold at the end of a run, in the order in which they were found."""
    monitor = Monitor()
    replay(run, monitor)
    return tuple(sorted(monitor.signs.values(), key=lambda sign: sign.step))


def replay(run: Run, monitor: Monitor) -> list[Sign]:
    """Pass the steps and measurements of a run to a monitor; return the signs."""
    measured: dict[int, list[str]] = {}
    for row in run.measured():
        measured.setdefault(row["step"], []).append(row["messages"][-1]["content"])
    rows: list[tuple[Mapping[str, Any], list[str] | None]] = [(row, None) for row in run.training]
    rows += [(row, measured.get(row["step"], [])) for row in run.held_out]
    rows.sort(key=lambda each: (each[0]["step"], each[1] is not None))
    return [sign for row, replies in rows for sign in monitor.add(row["step"], row, replies)]


def template(reply: str) -> str:
    """Return a reply with numbers as N, names (capitalised words inside a sentence) as X, single spaces, and no stops.

    Example:
        >>> template("I would ask  Anna for 3,000.")
        'I would ask X for N'
    """
    text = re.sub(r"\d+(?:[.,]\d+)*", "N", " ".join(reply.split()))
    text = re.sub(r"(?<=[\w,;] )[A-Z][a-z]\w*", "X", text)
    return re.sub(r"(?<=\w)[.,;:]+(?=\s|$)", "", text)


def _apart(high: tuple[float, int], low: tuple[float, int], errors: float) -> bool:
    """Return whether one share is larger than another by more than this many standard errors of the difference."""
    # One more right and one more wrong answer keep the error above 0.
    shares = [((share * count + 1) / (count + 2), count) for share, count in (high, low)]
    error = math.sqrt(sum(share * (1 - share) / count for share, count in shares))
    return high[0] - low[0] > errors * error
