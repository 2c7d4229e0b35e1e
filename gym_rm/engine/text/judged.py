"""What of a reply is judged: all of it, or its answer alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import pydantic

from gym_rm.config import Config, Finite
from gym_rm.engine.text.messages import plain_content
from gym_rm.engine.text.thinking import UNFINISHED, Thinking
from gym_rm.errors import ConversationError, RowError
from gym_rm.scorer import check_rows
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Message, Prompts

Judged: TypeAlias = Literal["all", "answer"]
ThinkingOption: TypeAlias = Annotated[Any, pydantic.BeforeValidator(Thinking.parse)]
EMPTY = Message(role="assistant", content="")
NO_OUTCOME = f"{UNFINISHED}; pass unfinished=, the reward of such a reply, or fallback_reward= to the environment"


class JudgedOptions(Config):
    """What of a reply is judged."""

    judged: Judged = "all"
    """`"answer"` judges replies without their thinking, also in earlier turns and in fields of the messages."""
    thinking: ThinkingOption = None
    """How the policy marks its thinking: None for common tags, `"opened"` if its chat template writes the opening tag,
    `[open, close]` for other tags, or both: `{"tags": [open, close], "opened": true}`."""
    unfinished: Finite | None = None
    """Reward of a reply whose thinking has not ended, with `judged="answer"`; None makes it an error of the row."""

    @property
    def settings(self) -> dict[str, Any]:
        """The options that differ from these defaults, for `Provenance`."""
        judged = None if self.judged == "all" else self.judged
        values = {"judged": judged, "thinking": self.thinking.setting, "unfinished": self.unfinished}
        return {name: value for name, value in values.items() if value is not None}

    def read(
        self, conversations: Sequence[Conversation], prompts: Prompts, *, as_empty: bool = False
    ) -> tuple[Sequence[Conversation], Prompts, Callable[[Scores], Scores]]:
        """Return what to score, its prompts, and the function that makes scores of these into scores of all N rows.

        Last replies with thinking have the infos `thinking_characters` and `answer_characters`. A reply without an
        answer gets `unfinished`, or with `as_empty` the score of an empty reply.
        """
        check_rows(conversations, prompts)
        if self.judged == "all":
            return conversations, prompts, lambda scores: scores
        judged, rows = dict(enumerate(conversations)), range(len(conversations))
        lengths, starts = np.zeros((2, len(rows)), dtype=np.int64), dict[int, int]()
        for row, conversation in enumerate(conversations):
            if not isinstance(conversation, Sequence) or not all(isinstance(each, Mapping) for each in conversation):
                continue  # the scorer says what is wrong, as for a reply that is no text
            last = max((k for k, turn in enumerate(conversation) if turn.get("role") == "assistant"), default=None)
            with contextlib.suppress(ConversationError):
                messages, thought, answer = self.thinking.answered(conversation)
                lengths[:, row] = len(thought), len(answer or "")
                if answer is not None:
                    judged[row] = messages
                    if last is not None:
                        starts[row] = _start(messages[last], conversation[last])
                elif last is not None and as_empty:
                    judged[row] = [*conversation[:last], EMPTY, *conversation[last + 1 :]]
                elif last is not None:
                    del judged[row]

        def complete(scores: Scores) -> Scores:
            scores = scores.scatter(list(judged), len(rows))
            missing, thinks = np.array([row not in judged for row in rows], dtype=np.bool_), lengths[0] > 0
            reward, error = (np.nan, RowError(NO_OUTCOME)) if self.unfinished is None else (self.unfinished, None)
            shown = np.where(thinks, lengths, np.array(None))
            named = {"thinking_characters": shown[0], "answer_characters": shown[1]} if thinks.any() else {}
            placed = [(each, starts.get(row, 0)) for row, each in enumerate(scores.step_ends or ())]
            ends = tuple(each[:0] if start < 0 else each + start for each, start in placed)
            return dataclasses.replace(
                scores,
                rewards=np.where(missing, reward, scores.rewards),
                errors=tuple(error if missing[row] else scores.errors[row] for row in rows),
                step_ends=None if scores.step_ends is None else ends,
                infos={**scores.infos, **named},
            )

        return list(judged.values()), None if prompts is None else [prompts[row] for row in judged], complete


def _start(answer: Message, reply: Message) -> int:
    """Return where the answer starts in the reply; -1 if thoughts are between its parts, or one is no text."""
    part, whole = (plain_content(each.get("content")) for each in (answer, reply))
    return whole.rfind(part) if isinstance(part, str) and isinstance(whole, str) else -1
