"""Token ids of a text, and of texts that begin like it."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Sequence

import numpy as np

from gym_rm.engine.text.rendered import TokenIds


class EncodedText:
    """Token ids of a text, from which the ids of texts with a common prefix are made.

    A tokenizer splits a text at its control tokens before anything else, so what stands before a control token that two
    texts share has the same ids in both.

    Args:
        text, ids: the text, and its token ids `[L]`.
        offsets: for each token, the positions of its first character and after its last one.
        control: ids of the control tokens.
        tokenize: returns the ids of a text.
    """

    def __init__(
        self,
        text: str,
        ids: Sequence[int],
        offsets: Sequence[tuple[int, int]],
        control: Collection[int],
        tokenize: Callable[[str], TokenIds],
    ) -> None:
        self.ids: TokenIds = np.array(ids, dtype=np.int32)
        self._text = text
        self._tokens = [index for index, token in enumerate(ids) if token in control]
        self._offsets = offsets
        self._tokenize = tokenize

    def ids_of(self, other: str) -> TokenIds:
        """Return the ids of another text; only what follows the last common control token is tokenised."""

        def differs(token: int) -> bool:
            return not other.startswith(self._text[: self._offsets[token][1]])

        common = bisect.bisect_left(self._tokens, True, key=differs)
        last = self._tokens[common - 1] if common else 0
        start = self._offsets[last][0] if common else 0
        return np.concatenate([self.ids[:last], self._tokenize(other[start:])])
