"""Which rows of a call are replies to the same prompt."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from gym_rm.types import Conversation, Message, Prompt, Prompts


def groups_of(conversations: Sequence[Conversation], prompts: Prompts, rows: Iterable[int]) -> list[list[int]]:
    """Return the rows of each group, in the order of the call.

    Rows belong together if they started from the same data row (`prompt_id` and messages); without one, if they are
    equal before the last message. Two groups with one prompt in a call are one group.

    Args:
        conversations: `[N]`.
        prompts: `[N]`, the data row of each or None; None if there are none.
        rows: the rows to divide.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        prompt = None if prompts is None else prompts[row]
        beginning = beginning_of(conversations[row], prompt)
        key = "" if prompt is None else prompt.prompt_id, repr([dict(message) for message in beginning])
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def beginning_of(conversation: Conversation, prompt: Prompt | None) -> Sequence[Message]:
    """Return the messages that the replies of a group share: those of the data row, or all but the last one."""
    size = 0 if prompt is None else len(prompt.messages)
    # By roles, because the messages of the conversation may have been cleaned since.
    roles = [message["role"] for message in (() if prompt is None else prompt.messages)]
    same = 0 < size < len(conversation) and [message["role"] for message in conversation[:size]] == roles
    return conversation[:size] if same else conversation[:-1]


def shared_beginning(conversations: Sequence[Conversation], prompt: Prompt | None) -> Sequence[Message]:
    """Return the messages with which all conversations of a group begin, at least those of their data row."""
    size = len(beginning_of(conversations[0], prompt))
    longest = min(map(len, conversations)) - 1
    more = zip(*(conversation[size:longest] for conversation in conversations), strict=False)
    same = itertools.takewhile(lambda messages: all(each == messages[0] for each in messages), more)
    return conversations[0][: size + sum(1 for _ in same)]
