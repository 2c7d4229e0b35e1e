"""Texts that the caller has rendered, and token ids: as sequences to score, without a chat template."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gym_rm.engine.text.messages import check_text
from gym_rm.engine.text.overlong import too_long
from gym_rm.engine.text.rendered import Rendered, TokenIds
from gym_rm.engine.text.renderer import Renderer
from gym_rm.errors import ConversationError


def encode_text(renderer: Renderer, text: str | Sequence[int], add_special_tokens: bool) -> Rendered:
    """Return a rendered text or token ids as a sequence to score.

    Raises:
        ConversationError: the text is empty, not text, or longer than `max_length`, or an id is negative.
    """
    if isinstance(text, str):
        check_text(text, "the text")
        ids = tokenize_text(renderer, text, add_special_tokens)
    else:
        ids = np.array(text, dtype=np.int32)
    if not len(ids):
        raise ConversationError("the text has no tokens.")
    if ids.min() < 0:
        raise ConversationError(f"token ids must not be negative; got {ids.min()}.")
    if renderer.max_length is not None and len(ids) > renderer.max_length:
        raise too_long(len(ids), renderer.max_length, "error")
    return Rendered(ids)


def tokenize_text(renderer: Renderer, text: str, add_special_tokens: bool = True) -> TokenIds:
    """Return the token ids of a rendered text, with the special tokens of the tokenizer that it lacks, or as is."""
    if add_special_tokens:
        return renderer.tokenize([text])[0]
    ids = renderer.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return np.array(ids, dtype=np.int32)
