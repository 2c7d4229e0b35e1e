"""Ask a chat model questions until each has a verdict or an error."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gym_rm.generation.chat import ChatModel, ChatReply, check_replies
from gym_rm.scorers.judge.prompts import FencedQuestions, Question
from gym_rm.scorers.judge.styles import StyleQuestions
from gym_rm.scorers.judge.verdicts import NoVerdict
from gym_rm.types import Message

Questions: TypeAlias = FencedQuestions | StyleQuestions
"""How a judge is asked, and how its answers are read."""

AGAIN = "Your answer had no verdict that can be read. Leave out your reasons. "
UNASKED = "it was not asked"


@dataclass(slots=True)
class Ask:
    """A question to the judge, and what came of it.

    Attributes:
        question: the question.
        seed: seed of the first answer; each further one adds 1.
        values: the verdict: a value for each reply, or for each criterion. None if there is none.
        error: why there is no verdict.
        text: the last answer.
        reason: why it has no verdict.
        answers: number of answers.
        tokens: tokens of all requests and answers; None if the model does not count them.
    """

    question: Question
    seed: int
    values: tuple[float, ...] | None = None
    error: str | None = None
    text: str = ""
    reason: str = UNASKED
    answers: int = 0
    tokens: int | None = 0


def ask_all(
    model: ChatModel, questions: Questions, asks: Sequence[Ask], *, max_retries: int, timeout: float, deadline: float
) -> None:
    """Ask until every question has a verdict or an error.

    Args:
        model: the judge.
        questions: how it is asked, and how its answers are read.
        asks: what to ask; they are changed.
        max_retries: how often an answer without a verdict is asked for again.
        timeout: seconds of the call, for messages.
        deadline: time of `time.monotonic` after which nothing is asked.
    """
    left = list(asks)
    for attempt in range(1 + max_retries):
        if not left or (attempt and time.monotonic() >= deadline):
            break
        replies = model.reply(
            [_messages(ask, questions) for ask in left], seeds=[ask.seed + attempt for ask in left], deadline=deadline
        )
        for ask, reply in zip(left, check_replies(model, replies, len(left)), strict=True):
            _take(ask, reply, questions)
        left = [ask for ask in left if ask.values is None and ask.error is None]
    late = f" within timeout={timeout:g}" if time.monotonic() >= deadline else ""
    for ask in left:
        ask.error = (
            f"the judge gave no verdict{late} in {ask.answers} answers: {ask.reason}; its last: {ask.text[-100:]!r}"
        )


def _messages(ask: Ask, questions: Questions) -> list[Message]:
    """Return the conversation with the judge. After an answer without a verdict, only the verdict is asked for."""
    messages = list(ask.question.messages)
    again = questions.again(ask.question) if ask.answers else None
    if again is None:
        return messages
    said = Message(role="assistant", content=ask.text or "...")
    return [*messages, said, Message(role="user", content=AGAIN + again)]


def _take(ask: Ask, reply: ChatReply, questions: Questions) -> None:
    if reply.error is not None:
        ask.error = f"no answer of the judge: {reply.error}"
        return
    ask.answers, ask.text = ask.answers + 1, reply.text
    ask.tokens = None if ask.tokens is None or reply.num_tokens is None else ask.tokens + reply.num_tokens
    if not reply.finished and len(reply.top_log_probs) != 1:  # one token is all that some judges write
        ask.reason = "it was cut at max_new_tokens" if reply.text else "it was empty, or cut at max_new_tokens"
        return
    try:
        ask.values = questions.read(reply, ask.question)
    except NoVerdict as error:
        ask.reason = str(error)
