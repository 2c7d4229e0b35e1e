"""Cache of scored sequences, looked up by their token ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gym_rm.engine.text.rendered import Rendered
from gym_rm.scores import FloatArray


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """Score of one token sequence, or its error.

    Attributes:
        reward: the reward; NaN if there is an error.
        components: float32 `[H]`, the reward's components.
        error: reason of a missing score, or None.
        steps: float32 `[K]`, one reward per step of the sequence; None for kinds without step rewards.
    """

    reward: float
    components: FloatArray
    error: str | None = None
    steps: FloatArray | None = None


class ScoreCache:
    """Scores of up to `size` sequences; the least recently used is removed first.

    Args:
        size: maximum number of sequences; 0 keeps none.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._scored: OrderedDict[bytes, ScoredSequence] = OrderedDict()
        self._version = 0

    def __len__(self) -> int:
        return len(self._scored)

    def keep_for(self, version: int) -> None:
        """Clear the cache if its scores are of another version of the weights."""
        if version != self._version:
            self.clear()
            self._version = version

    def find(self, sequences: Sequence[Rendered]) -> dict[int, ScoredSequence]:
        """Return the cached scores among M sequences, by index."""
        found: dict[int, ScoredSequence] = {}
        if not self.size:
            return found
        for m, rendered in enumerate(sequences):
            key = _key(rendered)
            if key in self._scored:
                found[m] = self._scored[key]
                self._scored.move_to_end(key)
        return found

    def add(self, sequences: Sequence[Rendered], scored: Mapping[int, ScoredSequence]) -> None:
        """Add the scores of M sequences; `scored` has them by index. Sequences with an error are not added."""
        if not self.size:
            return
        for m, rendered in enumerate(sequences):
            if scored[m].error is None:
                self._scored.setdefault(_key(rendered), scored[m])
        while len(self._scored) > self.size:
            self._scored.popitem(last=False)

    def clear(self) -> None:
        """Remove all scores."""
        self._scored.clear()


def _key(rendered: Rendered) -> bytes:
    marks = [-1 if mark is None else mark for mark in (rendered.second_segment, rendered.reply_start)]
    return np.array(marks, dtype=np.int32).tobytes() + rendered.input_ids.tobytes()
