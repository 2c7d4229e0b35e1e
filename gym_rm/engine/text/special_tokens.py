"""Special tokens that a tokenizer adds around a text (BOS, [CLS], [SEP]), for templates that do not write them."""

from __future__ import annotations

from typing import Any

import numpy as np

from gym_rm.engine.text.rendered import TokenIds
from gym_rm.errors import warn_once


class SpecialTokens:
    """Special tokens of a tokenizer before and after the ids of a conversation; for `add_bos`, see `TextOptions`."""

    def __init__(self, tokenizer: Any, *, add_bos: bool, encoder: bool) -> None:
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = tokenizer("a", add_special_tokens=True)["input_ids"]
        start = next((k for k in range(len(whole)) if whole[k : k + len(bare)] == bare), 0)
        self._prefix = np.array(whole[:start] if add_bos else [], dtype=np.int32)
        self._suffix = np.array(whole[start + len(bare) :] if add_bos and encoder else [], dtype=np.int32)
        self._eos = tokenizer.eos_token_id
        self._warning = None
        if not encoder:
            self._warning = (
                f"the chat template of {tokenizer.name_or_path!r} writes no BOS, but its tokenizer adds one, so a BOS "
                "is added. Pass add_bos=False to score conversations without a BOS."
            )

    def add(self, ids: TokenIds) -> TokenIds:
        """Return the ids with the special tokens that the template did not write."""
        if not len(ids):
            return ids
        parts = [ids]
        # The template may write a BOS after white space or a system block. If it is also EOS, later ones end turns.
        first = self._prefix[0] if len(self._prefix) else ids[0]
        if ids[0] != first and (first == self._eos or first not in ids):
            parts.insert(0, self._prefix)
            if self._warning is not None:
                warn_once(self._warning)
        if len(self._suffix) and ids[-1] != self._suffix[-1]:
            parts.append(self._suffix)
        return np.concatenate(parts) if len(parts) > 1 else ids
