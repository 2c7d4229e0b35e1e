"""Ask a chat model questions until each has a verdict or an error: all that a judge does outside of this process."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gym_rm.errors import RowError
from gym_rm.generation.chat import ChatReply, check_replies
from gym_rm.scorers.judge.questions import Question, Questions
from gym_rm.scorers.judge.verdicts import NoVerdict
from gym_rm.types import Message

AGAIN = "Your answer had no verdict that can be read. Leave out your reasons. "


@dataclass(frozen=True, slots=True)
class Answer:
    """What a judge answered to a question.

    Attributes:
        values: the verdict: a value for each reply. None if there is none.
        error: why there is no verdict.
        text: the last answer.
        reason: why it has no verdict.
        attempts: number of answers.
        tokens: tokens of all requests and answers; None if the model does not count them.
        mass, unknown: probability of all verdicts, and what a server hid of it; NaN for a verdict that was written.
    """

    values: tuple[float, ...] | None = None
    error: RowError | None = None
    text: str = ""
    reason: str = "it was not asked"
    attempts: int = 0
    tokens: int | None = 0
    mass: float = math.nan
    unknown: float = math.nan


def ask(
    model: Any, how: Questions, questions: Sequence[Question], *, max_retries: int, timeout: float
) -> dict[int, Answer]:
    """Ask until every question has a verdict or an error, and return the answers by the seeds of the questions.

    Args:
        model: the judge, a `ChatModel`.
        how: reads the answers.
        questions: what to ask. An answer is written with the question's seed, each further one with 1 more.
        max_retries: how often an answer without a verdict is asked for again.
        timeout: seconds after which nothing is asked.
    """
    deadline = time.monotonic() + timeout
    answers = {question.seed: Answer() for question in questions}
    unread = list(questions)
    for attempt in range(1 + max_retries):
        if not unread or (attempt and time.monotonic() >= deadline):
            break
        asked = [_messages(question, answers[question.seed]) for question in unread]
        if how.decides:
            choices = [[*question.verdicts] for question in unread]
            begin = f"{how.mode.verdict.line}:"
            replies = model.choose(asked, choices, begin=begin, deadline=deadline)
        else:
            seeds = [question.seed + attempt for question in unread]
            replies = model.reply(asked, seeds=seeds, deadline=deadline)
        for question, reply in zip(unread, check_replies(model, replies, len(unread)), strict=True):
            answers[question.seed] = _next(answers[question.seed], reply, how, question)
        unread = [each for each in unread if (said := answers[each.seed]).values is None and said.error is None]
    late = f" within timeout={timeout:g}" if time.monotonic() >= deadline else ""
    for question in unread:
        said = answers[question.seed]
        why = (
            f"the judge gave no verdict{late} in {said.attempts} answers: {said.reason}; its last: {said.text[-100:]!r}"
        )
        answers[question.seed] = dataclasses.replace(said, error=RowError(why, "timed_out" if late else "failed"))
    return answers


def _messages(question: Question, before: Answer) -> list[Message]:
    """Return the conversation with the judge. After an answer without a verdict, only the verdict is asked for."""
    messages = list(question.messages)
    if not before.attempts or not question.ending:
        return messages
    said = Message(role="assistant", content=before.text or "...")
    return [*messages, said, Message(role="user", content=AGAIN + question.ending)]


def _next(before: Answer, reply: ChatReply, how: Questions, question: Question) -> Answer:
    if reply.error is not None:
        kind = getattr(reply.error, "kind", "failed")
        return dataclasses.replace(before, error=RowError(f"no answer of the judge: {reply.error}", kind))
    tokens = None if before.tokens is None or reply.num_tokens is None else before.tokens + reply.num_tokens
    answer = Answer(text=reply.text, attempts=before.attempts + 1, tokens=tokens)
    if reply.masses is not None:
        answer = dataclasses.replace(answer, mass=math.fsum(reply.masses.values()), unknown=reply.unknown)
    if not reply.finished and len(reply.top_log_probs) != 1:  # one token is all that some judges write
        reason = "it was cut at max_new_tokens" if reply.text else "it was empty, or cut at max_new_tokens"
        return dataclasses.replace(answer, reason=reason)
    try:
        return dataclasses.replace(answer, values=how.read(reply, question))
    except NoVerdict as error:
        return dataclasses.replace(answer, reason=str(error))
