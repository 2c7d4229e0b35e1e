"""Base class of scorers that grade the text of the last reply: rules, and verifiers of math and code."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gym_rm.config import parse_settings
from gym_rm.engine.text.judged import JudgedOptions
from gym_rm.engine.text.messages import reply_text
from gym_rm.errors import ConversationError, RowError
from gym_rm.scorer import NeverCopied, check_conversations
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Prompt, Prompts, Provenance


@dataclass(frozen=True, slots=True)
class Grade:
    """Result of one row: its reward, or why it has none, and what the infos say about it."""

    reward: float = math.nan
    error: str | None = None
    infos: Mapping[str, Any] = field(default_factory=dict)


class ReplyScorer(NeverCopied, abc.ABC):
    """Scores the last reply of each conversation by its text and the row that it started from.

    Args:
        **judged: fields of `JudgedOptions`: what of a reply is judged.
    """

    model = "rule"
    """What decides, for `Provenance`."""
    as_empty = True
    """Whether a reply whose thinking has not ended is graded as an empty one."""

    def __init__(self, **judged: Any) -> None:
        self._judged = parse_settings(JudgedOptions, judged)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"

    @property
    def settings(self) -> dict[str, Any]:
        """The options: those in public attributes, and those of what is judged that differ from their defaults."""
        return {name: value for name, value in vars(self).items() if name[0] != "_"} | self._judged.settings

    @abc.abstractmethod
    def grades(self, replies: Sequence[tuple[str, Prompt | None]]) -> Sequence[Grade]:
        """Return one grade for each text of a reply, with its row if it has one."""

    def read(self, conversation: Conversation) -> str:
        """Return the text that is graded. Raises ConversationError if the conversation does not end with a reply."""
        return reply_text(conversation)

    def unread(self, error: RowError) -> Grade:
        """Return the grade of a conversation without a reply in text."""
        return Grade(error=error)

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Grade the last reply of N conversations.

        Raises:
            ConfigError: the arguments are not lists of one length.
            ScoringError: some rows have no score; the error's `scores` has the scores of the others.
        """
        check_conversations(conversations, prompts)
        conversations, prompts, complete = self._judged.read(conversations, prompts, as_empty=self.as_empty)
        grades: dict[int, Grade] = {}
        replies: dict[int, tuple[str, Prompt | None]] = {}
        for row, conversation in enumerate(conversations):
            try:
                replies[row] = self.read(conversation), None if prompts is None else prompts[row]
            except ConversationError as error:
                grades[row] = self.unread(RowError.of(error))
        grades |= zip(replies, self.grades(list(replies.values())), strict=True)
        rows = [grades[row] for row in range(len(conversations))]
        scores = Scores.from_rewards(
            [each.reward for each in rows],
            errors=[each.error for each in rows],
            infos={name: [each.infos[name] for each in rows] for name in (rows[0].infos if rows else ())},
            provenance=Provenance(type(self).__name__, self.model, settings=self.settings),
        )
        return complete(scores).raise_for_errors()
