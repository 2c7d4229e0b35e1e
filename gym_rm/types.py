"""Types for conversations, and for the data rows that they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypedDict


class Message(TypedDict):
    """One turn of a conversation. `role` is the speaker (`"system"`, `"user"`, `"assistant"`, ...)."""

    role: str
    content: str


Conversation: TypeAlias = Sequence[Message]


def copy_conversation(conversation: Conversation) -> list[Message]:
    """Return a new list with a copy of every message."""
    return [message.copy() for message in conversation]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Data row that an episode starts from.

    Scorers and responders receive the prompt and the conversation. The policy receives only `messages`.

    Attributes:
        messages: the conversation up to and including the message that the policy answers.
        prompt_id: stable name of the prompt, reported in `infos`.
        user_turns: messages of the scripted user after the first, second, ... reply.
        answer: the reference answer, for verifiers.
        metadata: all other fields of the row.
    """

    messages: tuple[Message, ...]
    prompt_id: str
    user_turns: tuple[str, ...] = ()
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def copy_prompt(prompt: Prompt) -> Prompt:
    """Return a copy with its own messages and metadata; the values in the metadata are shared."""
    return replace(prompt, messages=tuple(copy_conversation(prompt.messages)), metadata=dict(prompt.metadata))


Prompts: TypeAlias = "Sequence[Prompt | None] | None"
"""One prompt or None per conversation; None if no conversation has a prompt."""


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """One prompt with a preferred and a rejected reply.

    Attributes:
        prompt: the messages that both conversations share.
        chosen: the messages after the prompt in the preferred conversation.
        rejected: the messages after the prompt in the rejected conversation.
        margin: how much better `chosen` was rated than `rejected`, or None.
        metadata: all other fields of the row (subset, source, ...).
    """

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    margin: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
