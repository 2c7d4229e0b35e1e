"""A conversation as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

TokenIds: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids of a conversation, or of its beginning up to one turn.

    Attributes:
        input_ids: int32 `[L]`.
        truncated_tokens: number of tokens that were removed to fit `max_length`.
        dropped_characters: number of characters of messages that the chat template did not write, without white space.
        second_segment: index of the first reply token of a text pair (encoders without a chat template), or None.
        reply_start: index of the first token of the last message, if `InputFormat.mark_reply` is set, else None.
        step_ends: where each step ends in the content of the last message, in characters; empty without step tokens.
    """

    input_ids: TokenIds
    truncated_tokens: int = 0
    dropped_characters: int = 0
    second_segment: int | None = None
    reply_start: int | None = None
    step_ends: tuple[int, ...] = ()


def common_prefix(first: TokenIds, second: TokenIds) -> int:
    """Return the length of the common prefix of two sequences of token ids."""
    limit = min(len(first), len(second))
    different = first[:limit] != second[:limit]
    shared = int(different.argmax()) if limit else 0
    return shared if limit and different[shared] else limit
