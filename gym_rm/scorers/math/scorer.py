"""Verifier of mathematical answers."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gym_rm.checks import integer, one_of, positive
from gym_rm.engine.text.judged import Judged
from gym_rm.engine.text.messages import reply_text
from gym_rm.sandbox.sandbox import available_cores
from gym_rm.scorers.math import answers, replies
from gym_rm.scorers.math.expressions import Kind
from gym_rm.scorers.math.formulas import FormulaComparer, FormulaPair
from gym_rm.scorers.math.numbers import (
    MAX_ANSWER_LENGTH,
    Number,
    decimal_comma,
    parse_number,
    same_number,
    strip_markup,
)
from gym_rm.scorers.math.replies import STYLES, Style
from gym_rm.scorers.reply_scorer import Grade, ReplyScorer
from gym_rm.types import Conversation, Prompt

VERDICTS = ("right", "wrong", "no_answer", "unparsable", "timeout")


@dataclass(frozen=True, slots=True)
class _Gold:
    """A reference answer in all forms that it is compared in."""

    text: str
    kind: Kind
    letter: str | None
    value: str  # of a choice, what stands behind its letter
    number: Number | None
    normal: str
    words: bool
    latex: str | None


@dataclass(slots=True)
class _Row:
    """The result of a row, or the formulas that are still to be compared."""

    verdict: str | None = None
    answer: str | None = None
    error: str | None = None
    formulas: FormulaPair | None = None

    @property
    def grade(self) -> Grade:
        """The reward and the infos of the row."""
        infos = {"verdict": self.verdict, "extracted_answer": self.answer}
        return Grade(math.nan if self.verdict is None else float(self.verdict == "right"), self.error, infos)


class MathScorer(ReplyScorer):
    """Compares the answer of the last assistant turn with the reference answer of the prompt.

    Numbers and letters of multiple choice are compared in this process. Formulas are compared by math-verify in the
    sandbox, whose processes are started when a row first needs them and end with `close`, the scorer or this process.
    docs/math.md describes where an answer may be and what counts as equal.

    The reward is 1.0 for a right answer, else 0.0. `infos` has `verdict`, one of `VERDICTS`, and `extracted_answer`, a
    text or None. A row without a reference answer, or with one that cannot be parsed, has an error instead of a reward.

    Args:
        style: where the answer is: `"auto"`, `"boxed"`, `"gsm8k"` (`#### 4`), `"answer"` (`Answer: 4`), `"last"` (the
            last number or formula), or `"choice"` (a letter).
        evaluated: whether an answer must be a value: `2^{10}`, `10!` or `\\frac{62}{2}`, but not `15+16` or
            `\\min(91,31)`, which leave the work to the reader. None: where the reference is a plain number; elsewhere
            an answer may only have the operations (`\\min`, `\\sum`, ...) of the reference. False: it need not.
        timeout: seconds of processor time for the comparison of one formula. The verdict is then `timeout`. A row
            that waits for a busy machine is compared again, and has an error after four times as long.
        num_workers: number of processes; None for one per available core, at most 8.
        judged, thinking: fields of `JudgedOptions`. A reply whose thinking has not ended has no answer.

    Raises:
        ConfigError: an option is invalid; later, from `score`: a row needs math-verify and it is not installed.

    Example:
        >>> prompt = Prompt(({"role": "user", "content": "Half of 9?"},), "p0", answer="9/2")
        >>> reply = {"role": "assistant", "content": "The answer is $4.50."}
        >>> scores = MathScorer().score([[*prompt.messages, reply]], [prompt])
        >>> scores.rewards.tolist(), scores.infos["verdict"].tolist(), scores.infos["extracted_answer"].tolist()
        ([1.0], ['right'], ['$4.50'])
    """

    model = "math-verify"

    def __init__(
        self,
        *,
        style: Style = "auto",
        evaluated: bool | None = None,
        timeout: float = 5.0,
        num_workers: int | None = None,
        judged: Judged = "answer",
        thinking: Any = None,
    ) -> None:
        self._options = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(judged=judged, thinking=thinking)
        self.style: str = one_of("style", style, STYLES)
        self.evaluated = evaluated
        self.timeout = positive("timeout", timeout)
        count = min(8, available_cores()) if num_workers is None else num_workers
        self._num_workers = integer("num_workers", count, minimum=1)
        self._comparer: FormulaComparer | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(MathScorer, **self._options), ()

    def close(self) -> None:
        """End the processes. A later `score` starts new ones."""
        comparer, self._comparer = self._comparer, None
        if comparer is not None:
            comparer.close()

    def grades(self, replies: Sequence[tuple[str, Prompt | None]]) -> Sequence[Grade]:
        """Return whether the answers of replies equal the reference answers of their rows."""
        rows = [self._row(*each) for each in replies]
        self._compare(rows)
        return [row.grade for row in rows]

    def read(self, conversation: Conversation) -> str:
        """Return the last assistant turn, which other turns may follow."""
        return reply_text([each for each in conversation if each["role"] == "assistant"])

    def unread(self, error: str) -> Grade:
        """Return the grade of a conversation that does not end with a reply in text."""
        return _Row(error=error).grade

    def _compare(self, rows: Sequence[_Row]) -> None:
        """Set verdicts or errors of rows with formulas. Equal formulas are compared once."""
        unique = list(dict.fromkeys(row.formulas for row in rows if row.formulas is not None))
        if not unique:
            return
        if self._comparer is None:
            self._comparer = FormulaComparer(num_workers=self._num_workers, timeout=self.timeout)
        verdicts = dict(zip(unique, self._comparer.compare(unique), strict=True))
        for row in rows:
            if row.formulas is not None:
                row.verdict, row.error = verdicts[row.formulas]

    def _row(self, reply: str, prompt: Prompt | None) -> _Row:
        others = () if prompt is None else prompt.metadata.get("answers")
        others = others.tolist() if isinstance(others, np.ndarray) else others
        texts = [] if prompt is None or prompt.answer is None else [prompt.answer]
        texts += [str(each) for each in others] if isinstance(others, list | tuple) else []
        if not texts:
            other = None if prompt is None else prompt.metadata.get("answer")
            wrong = "" if other is None else f", a text or a number (a list goes to `answers`), got {other!r:.80}"
            return _Row(error=f"the row has no reference answer; set `answer` of its prompt{wrong}")
        golds = [_gold(text) for text in texts]
        if self.style == "choice" and not all(gold.letter for gold in golds):
            return _Row(error=f"the reference answer {texts[0]!r:.80} is not the letter of a choice, A to J")
        if not all(gold.number or gold.letter or gold.words or gold.latex for gold in golds):
            return _Row(error=f"the reference answer cannot be parsed: {texts[0]!r:.200}")
        if self.style != "last" and all(gold.letter for gold in golds):
            named = replies.extract(reply, self.style, kind="letter")
            letter = named and (replies.choice_of_gold(named)[0] or replies.choice(f"Answer: {named}"))
            values = [_gold(gold.value) for gold in golds if gold.value]
            if letter or not values:
                right = any(gold.letter == letter for gold in golds)
                return _Row("no_answer" if named is None else "right" if right else "wrong", named)
            golds = values
        kinds: tuple[Kind, ...] = ("number", "words", "formula", "letter")
        kind = next(each for each in kinds if any(gold.kind == each for gold in golds))
        found = replies.extract(reply, self.style, kind=kind)
        return _Row("no_answer") if found is None else self._graded(golds, found)

    def _graded(self, golds: Sequence[_Gold], found: str) -> _Row:
        """Return the verdict on an answer, or the formulas to compare."""
        if len(found) > MAX_ANSWER_LENGTH:
            return _Row("unparsable", found[:MAX_ANSWER_LENGTH])
        numbers = all(gold.number is not None for gold in golds)
        if not any(answers.is_equation(gold.text) for gold in golds if gold.number is None):
            found = answers.value_side(found, any(gold.number and gold.number.places for gold in golds))
        number, normal = parse_number(found), answers.normal_text(found)
        if number is None and numbers:  # otherwise a comma may divide a list
            number = decimal_comma(found)
        for gold in golds:
            same = gold.number is not None and number is not None and same_number(gold.number, number)
            if same or gold.normal == normal:
                return _Row("right", found)
        if all(gold.words or (gold.number is not None and number is not None) for gold in golds):
            return _Row("wrong", found)
        if numbers and number is None and (answers.is_changed(found) or answers.is_equation(found) or ":" in found):
            return _Row("wrong", found)
        equations = all(answers.is_equation(answers.value_side(gold.text, False)) for gold in golds)
        if (
            equations
            and not any(set(gold.text) & set(",;:") for gold in golds)
            and not (answers.is_equation(found) or set(found) & set("([\\{∈"))
        ):
            return _Row("wrong", found)
        if any(answers.has_base(each) for each in (normal, *(gold.normal for gold in golds))):
            return _Row("wrong", found)
        if "\\{" in found and all(gold.text.startswith("(") for gold in golds):  # a set has no order
            return _Row("wrong", found)
        latex = None if answers.is_words(found) else answers.to_latex(found)
        if latex is None:
            return _Row("unparsable", found)
        references = tuple(gold.latex for gold in golds if gold.latex is not None and not gold.words)
        evaluated = self.evaluated if self.evaluated is not None else numbers
        if self.evaluated is not False and answers.operations(latex) - set().union(
            *map(answers.operations, references)
        ):
            return _Row("wrong", found)
        return _Row(answer=found, formulas=FormulaPair(references, latex, evaluated))


@functools.lru_cache(maxsize=16384)
def _gold(text: str) -> _Gold:
    text = replies.gold_answer(text)
    number = parse_number(text)
    short = len(text) <= MAX_ANSWER_LENGTH
    normal = answers.normal_text(text) if short else ""
    words = short and answers.is_words(strip_markup(text))
    letter, value = replies.choice_of_gold(text[:100])
    has_words = (
        re.search(r"(?<!\\)\b[^\W\d_]{3,}", re.sub(r"\\(?:begin|end)\{\w+|\\[A-Za-z]+", " ", text[:200])) is not None
    )
    kind: Kind = "letter" if letter else "number" if number else "words" if words or has_words else "formula"
    return _Gold(text, kind, letter, value, number, normal, words, answers.to_latex(text))
