"""One scorer for conversations, all of their turns, and rendered texts, so that all protocols share its batches.

Each sort of input is one call of the scorer. New weights are loaded between two batches.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from gym_rm.engine.text.messages import check_conversation, reply_text
from gym_rm.engine.text.renderer import Renderer
from gym_rm.errors import ConversationError, RowError
from gym_rm.scorer import Scorer, is_relative, try_score
from gym_rm.scores import Scores, ScoringError
from gym_rm.types import Prompts

Sort: TypeAlias = Literal["reply", "messages", "turns", "text", "text with special tokens"]
"""What is scored: the reply at the end of a conversation; messages whether or not the last one is a reply, as vLLM
does; every assistant turn; or a text (or token ids) that the caller rendered, without a chat template, as it is or with
the special tokens of the tokenizer that it lacks."""

ScorerInput: TypeAlias = Any
"""One input of a request: its sort, and a conversation, which can be any JSON value, or a text or token ids."""


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
        renderer = getattr(scorer, "renderer", None)
        self.renderer = renderer if isinstance(renderer, Renderer) else None
        marks_reply = self.renderer is not None and self.renderer.input_format.mark_reply
        self.scores_texts = callable(getattr(scorer, "score_texts", None)) and not marks_reply

    def score(self, conversations: Sequence[ScorerInput], prompts: Prompts = None) -> Scores:
        """Score N inputs; failures are in `Scores.errors`."""
        rows_of: dict[Sort, list[int]] = {}
        parts, order = [], []
        for row, (sort, value) in enumerate(conversations):
            try:
                if "text" not in sort:
                    checked = check_conversation(value)
                    if sort == "reply":
                        reply_text(checked)
                rows_of.setdefault("reply" if sort == "messages" else sort, []).append(row)
            except ConversationError as error:  # it would make a function fail for all rows of the batch
                parts.append(Scores.from_rewards([float("nan")], errors=[RowError.of(error)]))
                order.append(row)
        with self.lock:
            for sort, rows in rows_of.items():
                given = None if prompts is None else [prompts[row] for row in rows]
                parts.append(self._score(sort, [conversations[row][1] for row in rows], given))
                order += rows
        if len(parts) == 1:
            return parts[0]
        scores = Scores.concatenate(parts).take(sorted(range(len(order)), key=order.__getitem__))
        made = [part.provenance for part in parts if part.provenance is not None]
        return dataclasses.replace(scores, provenance=made[0] if made else None)

    def _score(self, sort: Sort, values: list[Any], prompts: Prompts) -> Scores:
        if sort == "reply":
            scores = try_score(self.scorer, values, prompts)
        elif sort == "turns":
            scores = try_score(self.scorer, values, prompts, turns="all")
        else:
            special = sort == "text with special tokens"
            try:
                scores = self.scorer.score_texts(values, add_special_tokens=special)  # type: ignore[attr-defined]
            except ScoringError as error:
                scores = error.scores
            scores = scores.mark_failures()
        self._observe(scores)
        return scores
