"""Shorten conversations that have more than `max_length` tokens."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias

from gym_rm.engine.text.messages import TOOLS_ROLE
from gym_rm.engine.text.rendered import Rendered
from gym_rm.errors import TooLongError
from gym_rm.types import Conversation

Overlong: TypeAlias = Literal["error", "drop_turns"]


def too_long(length: int | str, max_length: int) -> TooLongError:
    """Return the error for a conversation that is too long."""
    return TooLongError(
        f"the conversation has {length} tokens, more than max_length={max_length}; shorten it, increase max_length, or "
        "pass overlong='drop_turns', which keeps the system message, the last user message and the reply."
    )


def drop_turns(
    conversation: Conversation, rendered: Rendered, max_length: int, render: Callable[[Conversation], Rendered]
) -> Rendered:
    """Drop as few of the oldest turns as possible of a conversation that is too long, and return what is left.

    Raises:
        TooLongError: the system message, the last user message and the reply are too long.
    """
    kept = (TOOLS_ROLE, "system")
    first = next((k for k, message in enumerate(conversation) if message["role"] not in kept), 0)
    users = [k for k in range(first, len(conversation)) if conversation[k]["role"] == "user"]
    starts = users[1:] if users[:1] == [first] else users or list(range(first + 1, len(conversation)))[-1:]
    tried: dict[int, Rendered] = {}

    def fits(start: int) -> bool:
        tried[start] = render([*conversation[:first], *conversation[start:]])
        return len(tried[start].input_ids) <= max_length

    length, found = len(rendered.input_ids), bisect.bisect_left(starts, True, key=fits)
    if found == len(starts):
        raise too_long(length, max_length)
    shorter = tried[starts[found]]
    return replace(shorter, truncated_tokens=length - len(shorter.input_ids))
