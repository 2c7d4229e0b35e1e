"""Conversations that are longer than the model can read."""

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
    head: int,
    render: Callable[[Conversation], Rendered],
) -> Rendered:
    """A render of at most `max_length` tokens.

    Args:
        conversation: what was rendered.
        rendered: the whole of it.
        max_length: longest input in tokens.
        overlong: what to do with a longer one, see `TextOptions`.
        head: how many tokens at the start are kept in any case (BOS, [CLS]).
        render: renders a shorter conversation.

    Raises:
        ConversationError: it does not fit.
    """
    length = len(rendered.input_ids)
    if length <= max_length:
        return rendered
    if overlong == "truncate_left" and max_length > head:
        cut = length - max_length
        segment, reply = rendered.second_segment, rendered.reply_start
        return Rendered(
            np.delete(rendered.input_ids, slice(head, head + cut)),
            truncated_tokens=cut,
            second_segment=None if segment is None else max(head, segment - cut),
            reply_start=None if reply is None else max(head, reply - cut),
        )
    if overlong == "drop_turns":
        shorter = _drop_turns(conversation, max_length, render)
        if shorter is not None:
            return replace(shorter, truncated_tokens=length - len(shorter.input_ids))
    kept = " even with only the system message, the last user message and the reply" if overlong == "drop_turns" else ""
    raise ConversationError(
        f"the conversation has {length} tokens, over max_length={max_length}{kept}; raise max_length, or pass "
        "overlong='drop_turns' or 'truncate_left'."
    )


def _drop_turns(
    conversation: Conversation, max_length: int, render: Callable[[Conversation], Rendered]
) -> Rendered | None:
    """The render that fits with the fewest oldest turns dropped, if any does."""
    first = next((k for k, message in enumerate(conversation) if message["role"] != "system"), 0)
    users = [k for k in range(first, len(conversation)) if conversation[k]["role"] == "user"]
    starts = users[1:] if users[:1] == [first] else users or list(range(first + 1, len(conversation)))[-1:]
    tried: dict[int, Rendered] = {}

    def fits(start: int) -> bool:
        tried[start] = render([*conversation[:first], *conversation[start:]])
        return len(tried[start].input_ids) <= max_length

    found = bisect.bisect_left(starts, True, key=fits)
    return tried[starts[found]] if found < len(starts) else None
