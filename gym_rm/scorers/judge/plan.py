"""What a call of a judge asks: rows, the replies that are shown together, and the questions about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gym_rm.engine.text.messages import check_conversation, reply_text
from gym_rm.errors import ConversationError, RowError
from gym_rm.scorers.judge.asking import Answer
from gym_rm.scorers.judge.questions import Question
from gym_rm.scorers.judge.rubrics import Criterion
from gym_rm.types import Conversation, Prompt


@dataclass(frozen=True, slots=True)
class JudgeRow:
    """A row of a call: a conversation that ends with a reply, and its data row; or why there is nothing to judge."""

    conversation: Conversation
    prompt: Prompt | None
    error: RowError | None = None

    @classmethod
    def read(cls, given: Conversation, prompt: Prompt | None) -> JudgeRow:
        """Return a row, with its error if it does not end with a reply."""
        try:
            conversation = check_conversation(given)
            reply_text(conversation)
        except ConversationError as error:
            return cls((), prompt, RowError.of(error))
        return cls(conversation, prompt)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What a judge said of replies that it saw together.

    Attributes:
        values: `[S, K]`, of each of K replies in each sample that has all of its verdicts.
        consistent: share of these samples whose verdict is the same in both orders; NaN with one order.
        error: why a question has no verdict; None if all have one.
    """

    values: NDArray[np.float64]
    consistent: float
    error: RowError | None


@dataclass(frozen=True, slots=True)
class Case:
    """Replies that a judge sees together.

    Attributes:
        rows: the rows that have each reply; none for a reference reply.
        samples: for each sample, the orders in which the replies are shown, with the question.
        criterion: the criterion of a rubric, or None.
    """

    rows: tuple[tuple[int, ...], ...]
    samples: tuple[tuple[tuple[tuple[int, ...], Question], ...], ...]
    criterion: Criterion | None = None

    @property
    def questions(self) -> list[Question]:
        """All questions."""
        return [question for sample in self.samples for _, question in sample]

    def verdicts(self, answers: Mapping[int, Answer], *, choices: bool) -> Verdicts:
        """Return the verdicts.

        Args:
            answers: the answers by the seeds of the questions.
            choices: whether values are choices (1, 0.5 or 0). A choice that changes with the places of the replies
                says nothing about them, so it is a tie; scores in both places are averaged.
        """
        values, same = [], []
        for sample in self.samples:
            found = [(order, answers[question.seed].values) for order, question in sample]
            placed = np.array([_unplaced(order, said) for order, said in found if said is not None])
            if len(placed) < len(found):
                continue
            mean = placed.mean(axis=0)
            if len(placed) > 1:
                better = np.sign(placed[:, 0] - placed[:, 1])
                same.append(bool((better == better[0]).all()))
                mean = np.full_like(mean, 0.5) if choices and not same[-1] else mean
            values.append(mean)
        errors = (answers[question.seed].error for question in self.questions)
        error = next((error for error in errors if error is not None), None)
        found_values = np.array(values, dtype=np.float64).reshape(len(values), len(self.rows))
        return Verdicts(found_values, float(np.mean(same)) if same else float("nan"), error)


def _unplaced(order: Sequence[int], said: Sequence[float]) -> list[float]:
    """Return the values of replies that were shown in an order, in the order of the case."""
    return [value for _, value in sorted(zip(order, said, strict=True))]


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a call asks.

    Attributes:
        cases: what is shown together.
        errors: why a row cannot be judged, by row.
    """

    cases: list[Case] = field(default_factory=list)
    errors: dict[int, RowError] = field(default_factory=dict)

    @property
    def questions(self) -> list[Question]:
        """The questions, each once."""
        return list({question.seed: question for case in self.cases for question in case.questions}.values())

    def fail(self, rows: Sequence[int], reason: RowError) -> None:
        """Note why rows cannot be judged; the first reason of a row counts."""
        for row in rows:
            self.errors.setdefault(row, reason)
