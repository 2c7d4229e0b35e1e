"""The scorer behind the server: conversations, all of their turns, and rendered texts in one batch.

Requests of all protocols wait in one queue, so a batch can have rows of several sorts. Each sort is one call of the
scorer. New weights are loaded between two batches.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from gym_rm.checks import describe
from gym_rm.engine.text.rendered_texts import tokenize_text
from gym_rm.scorer import Scorer, try_score
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Prompt, Prompts


@dataclass(frozen=True, slots=True)
class AllTurns:
    """A conversation whose every assistant turn is scored."""

    conversation: Any


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text or token ids that the caller rendered: scored as they are, without a chat template.

    Attributes:
        content: the text, or the token ids.
        add_special_tokens: whether to add the special tokens of the tokenizer that the text lacks.
        truncate: maximum number of tokens; the others are removed. None for no truncation.
        side: where tokens are removed.
    """

    content: str | list[int]
    add_special_tokens: bool = True
    truncate: int | None = None
    side: Literal["left", "right"] = "right"


Item: TypeAlias = Any
"""A conversation, `AllTurns` or `Rendered`; a conversation of a request can be any JSON value."""


class Door:
    """Scorer of items of several sorts, called by one thread.

    Args:
        scorer: the scorer.
        observe: function that is called with the scores and the seconds of every call of the scorer.
    """

    def __init__(self, scorer: Scorer, observe: Callable[[Scores, float], None]) -> None:
        self.scorer = scorer
        self._observe = observe
        self._lock = threading.Lock()
        self.scores_turns = _takes_turns(scorer)
        self.scores_texts = callable(getattr(scorer, "score_texts", None))

    def score(self, conversations: Sequence[Item], prompts: Prompts = None) -> Scores:
        """Score N items; failures are in `Scores.errors`."""
        sorts: dict[Any, list[int]] = {}
        for row, item in enumerate(conversations):
            sorts.setdefault(_sort(item), []).append(row)
        with self._lock:
            parts = [self._part(sort, conversations, prompts, rows) for sort, rows in sorts.items()]
        if len(parts) == 1:
            return parts[0]
        order = [row for rows in sorts.values() for row in rows]
        scores = Scores.concatenate(parts).take(sorted(range(len(order)), key=order.__getitem__))
        made = [part.provenance for part in parts if part.provenance is not None]
        return dataclasses.replace(scores, provenance=made[0] if made else None)

    def update_weights(self, path: str) -> None:
        """Load other weights between two batches; the old ones are kept if they do not fit."""
        with self._lock:
            self.scorer.update_weights(path)  # type: ignore[attr-defined]

    def calibrate(self, conversations: Sequence[Conversation]) -> Scores:
        """Score known conversations between two batches, without counting them."""
        with self._lock:
            return try_score(self.scorer, conversations)

    def token_ids(self, item: Rendered) -> list[int]:
        """Return the token ids of a rendered text, truncated."""
        ids = item.content
        if isinstance(ids, str):
            renderer = self.scorer.renderer  # type: ignore[attr-defined]
            ids = tokenize_text(renderer, ids, item.add_special_tokens).tolist()
        if item.truncate is None or len(ids) <= item.truncate:
            return list(ids)
        return ids[: item.truncate] if item.side == "right" else ids[len(ids) - item.truncate :]

    def _part(self, sort: Any, items: Sequence[Item], prompts: Prompts, rows: list[int]) -> Scores:
        given: list[Prompt | None] | None = None if prompts is None else [prompts[row] for row in rows]
        if sort == "malformed":
            errors = [_malformed(items[row]) for row in rows]
            return Scores.from_rewards([float("nan")] * len(rows), errors=errors)
        start = time.perf_counter()
        scores = self._call(sort, [items[row] for row in rows], given)
        self._observe(scores, time.perf_counter() - start)
        return scores

    def _call(self, sort: Any, items: list[Item], prompts: list[Prompt | None] | None) -> Scores:
        if sort == "conversation":
            return try_score(self.scorer, items, prompts)
        if sort == "turns":
            return try_score(self.scorer, [item.conversation for item in items], prompts, turns="all")
        texts: list[Any] = [item.content if item.truncate is None else self.token_ids(item) for item in items]
        return try_score(_Texts(self.scorer, sort == "text+special"), texts)


@dataclass(frozen=True, slots=True)
class _Texts:
    """`score_texts` of a scorer as `score`."""

    scorer: Any
    add_special_tokens: bool

    def score(self, conversations: Sequence[Any], prompts: Prompts = None) -> Scores:
        scores: Scores = self.scorer.score_texts(conversations, add_special_tokens=self.add_special_tokens)
        return scores


def _sort(item: Item) -> str:
    if isinstance(item, Rendered):
        return "text+special" if item.add_special_tokens else "text"
    conversation = item.conversation if isinstance(item, AllTurns) else item
    if _malformed(conversation) is not None:
        return "malformed"
    return "turns" if isinstance(item, AllTurns) else "conversation"


def _malformed(item: Item) -> str | None:
    """Return why a value of a request is not a conversation; a function would fail on it for all rows of a batch."""
    conversation = item.conversation if isinstance(item, AllTurns) else item
    if not isinstance(conversation, list):
        return f"a conversation must be a list of {{'role', 'content'}} messages; got {describe(conversation)[:80]}."
    if not conversation:
        return "the conversation is empty; expected at least one message."
    for index, message in enumerate(conversation):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f"message {index} must be {{'role': ..., 'content': ...}}; got {describe(message)[:80]}."
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            return f"message {index} must have a text as its content."
    return None


def _takes_turns(scorer: Scorer) -> bool:
    try:
        inspect.signature(scorer.score).bind([], None, turns="all")
    except (TypeError, ValueError):
        return False
    return True
