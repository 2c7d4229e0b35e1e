"""A conversation as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

TokenIds: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation, up to one of its turns, as the model will see it.

    Attributes:
        input_ids: int32 `[L]`.
        truncated_tokens: how many tokens were cut to fit `max_length`.
        second_segment: where the reply of a text pair starts (encoders without a chat template), or None.
        reply_start: where the last message starts, for kinds that need it (`InputFormat.mark_reply`), or None.
    """

    input_ids: TokenIds
    truncated_tokens: int = 0
    second_segment: int | None = None
    reply_start: int | None = None
