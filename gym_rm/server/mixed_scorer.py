"""One scorer for conversations, all of their turns, and rendered texts, so that all protocols share its batches.

Each sort of input is one call of the scorer. New weights are loaded between two batches.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from gym_rm.engine.text.messages import check_conversation, reply_text
from gym_rm.errors import ConversationError, RowError
from gym_rm.scorer import Scorer, is_relative, try_score
from gym_rm.scores import Scores, ScoringError
from gym_rm.types import Prompts


@dataclass(frozen=True, slots=True)
class AllTurns:
    """A conversation whose every assistant turn is scored."""

    conversation: Any


@dataclass(frozen=True, slots=True)
class AnyMessages:
    """Messages to score whether or not the last one is a reply, as vLLM does."""

    messages: Any


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A text or token ids that the caller rendered: scored as they are, without a chat template.

    Attributes:
        content: the text, or the token ids.
        add_special_tokens: whether to add the special tokens of the tokenizer that the text lacks.
    """

    content: str | list[int]
    add_special_tokens: bool = True


ScorerInput: TypeAlias = Any
"""A conversation with a reply, `AnyMessages`, `AllTurns` or `RenderedText`; a conversation of a request can be any JSON
value."""


class MixedScorer:
    """Scorer of inputs of several sorts, called by one thread.

    `observe` is called with the scores of every call of the scorer. Whoever holds `lock` may call the scorer between
    two batches.
    """

    def __init__(self, scorer: Scorer, observe: Callable[[Scores], None]) -> None:
        self.scorer = scorer
        self._observe = observe
        self.lock = threading.RLock()
        self.relative = is_relative(scorer)
        try:
            inspect.signature(scorer.score).bind([], None, turns="all")
            self.scores_turns = True
        except (TypeError, ValueError):
            self.scores_turns = False
        self.scores_texts = callable(getattr(scorer, "score_texts", None))

    def score(self, conversations: Sequence[ScorerInput], prompts: Prompts = None) -> Scores:
        """Score N inputs; failures are in `Scores.errors`."""
        rows_of: dict[str, list[int]] = {}
        parts, order = [], []
        for row, one in enumerate(conversations):
            try:
                rows_of.setdefault(_sort(one), []).append(row)
            except ConversationError as error:  # it would make a function fail for all rows of the batch
                parts.append(Scores.from_rewards([float("nan")], errors=[RowError.of(error)]))
                order.append(row)
        with self.lock:
            for sort, rows in rows_of.items():
                given = None if prompts is None else [prompts[row] for row in rows]
                parts.append(self._score(sort, [conversations[row] for row in rows], given))
                order += rows
        if len(parts) == 1:
            return parts[0]
        scores = Scores.concatenate(parts).take(sorted(range(len(order)), key=order.__getitem__))
        made = [part.provenance for part in parts if part.provenance is not None]
        return dataclasses.replace(scores, provenance=made[0] if made else None)

    def _score(self, sort: str, inputs: list[ScorerInput], prompts: Prompts) -> Scores:
        if sort == "conversation":
            conversations = [one.messages if isinstance(one, AnyMessages) else one for one in inputs]
            scores = try_score(self.scorer, conversations, prompts)
        elif sort == "turns":
            scores = try_score(self.scorer, [one.conversation for one in inputs], prompts, turns="all")
        else:
            texts, special = [one.content for one in inputs], sort == "text with special tokens"
            try:
                scores = self.scorer.score_texts(texts, add_special_tokens=special)  # type: ignore[attr-defined]
            except ScoringError as error:
                scores = error.scores
            scores = scores.mark_failures()
        self._observe(scores)
        return scores


def _sort(one: ScorerInput) -> str:
    """Return the call of the scorer that an input belongs to.

    Raises:
        ConversationError: it is not a conversation with a reply.
    """
    if isinstance(one, RenderedText):
        return "text with special tokens" if one.add_special_tokens else "text"
    if isinstance(one, AllTurns):
        check_conversation(one.conversation)
        return "turns"
    if isinstance(one, AnyMessages):
        check_conversation(one.messages)
    else:
        reply_text(check_conversation(one))
    return "conversation"
