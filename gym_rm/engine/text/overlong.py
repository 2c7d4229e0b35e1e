"""Shorten conversations that have more than `max_length` tokens."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np

from gym_rm.engine.text.rendered import Rendered
from gym_rm.errors import ConversationError
from gym_rm.types import Conversation

Overlong: TypeAlias = Literal["error", "drop_turns", "truncate_left"]


def fit(
    conversation: Conversation,
    rendered: Rendered,
    *,
    max_length: int,
    overlong: Overlong,
    head: slice,
    render: Callable[[Conversation], Rendered],
) -> Rendered:
    """Return the rendered conversation, shortened to at most `max_length` tokens.

    Args:
        conversation: the conversation.
        rendered: the conversation as token ids.
        max_length: maximum number of tokens.
        overlong: how to shorten a longer conversation, see `TextOptions`.
        head: positions of the tokens that are never removed (BOS, [CLS]).
        render: function that renders a conversation.

    Raises:
        ConversationError: the conversation is too long and could not be shortened.
    """
    length = len(rendered.input_ids)
    if length <= max_length:
        return rendered
    kept = head.stop - head.start
    if overlong == "truncate_left" and max_length > kept:
        cut = length - max_length
        removed = np.delete(np.arange(length), head)[:cut]
        segment, reply = rendered.second_segment, rendered.reply_start
        return replace(
            rendered,
            input_ids=np.delete(rendered.input_ids, removed),
            truncated_tokens=cut,
            second_segment=None if segment is None else max(kept, segment - cut),
            reply_start=None if reply is None else max(kept, reply - cut),
        )
    if overlong == "drop_turns":
        shorter = _drop_turns(conversation, max_length, render)
        if shorter is not None:
            return replace(shorter, truncated_tokens=length - len(shorter.input_ids))
    raise too_long(length, max_length, overlong)


def too_long(length: int, max_length: int, overlong: Overlong) -> ConversationError:
    """Return the error for a conversation that could not be shortened."""
    left = " even with only the system message, the last user message and the reply" if overlong == "drop_turns" else ""
    return ConversationError(
        f"the conversation has {length} tokens, more than max_length={max_length}{left}; increase max_length, or pass "
        "overlong='drop_turns' or 'truncate_left'."
    )


def _starts(conversation: Conversation) -> tuple[int, list[int]]:
    """Return the number of system messages, and the indices of messages with which a shorter conversation may begin."""
    first = next((k for k, message in enumerate(conversation) if message["role"] != "system"), 0)
    users = [k for k in range(first, len(conversation)) if conversation[k]["role"] == "user"]
    starts = users[1:] if users[:1] == [first] else users or list(range(first + 1, len(conversation)))[-1:]
    return first, starts


def _drop_turns(
    conversation: Conversation, max_length: int, render: Callable[[Conversation], Rendered]
) -> Rendered | None:
    """Drop as few of the oldest turns as possible; return None if the conversation is still too long."""
    first, starts = _starts(conversation)
    tried: dict[int, Rendered] = {}

    def fits(start: int) -> bool:
        tried[start] = render([*conversation[:first], *conversation[start:]])
        return len(tried[start].input_ids) <= max_length

    found = bisect.bisect_left(starts, True, key=fits)
    return tried[starts[found]] if found < len(starts) else None
