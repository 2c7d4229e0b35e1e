"""Completions, and the protocol of what samples them: token ids in, completions out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

TokenIds = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion.

    Attributes:
        token_ids: int32 `[T]`, with the end token if there is one; empty only if sampling had no time to begin.
        log_probs: float32 `[T]`, log-probabilities of the tokens at the sampling temperature.
        finished: whether it ended with an end token within the maximum number of tokens.
        text: its text without the end token. Other special tokens stay, so that the reward model scores them too.
        version: number of updates of the weights that sampled it.
    """

    token_ids: TokenIds
    log_probs: NDArray[np.float32]
    finished: bool
    text: str
    version: int = 0


NOTHING = Completion(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32), finished=False, text="")


class Sampler(Protocol):
    """Anything that samples completions from the current policy, at the temperature of training."""

    def sample(self, prompts: Sequence[TokenIds], *, seeds: Sequence[int]) -> list[Completion]:
        """Sample one completion for each prompt; equal prompts are computed once.

        Args:
            prompts: B prompts, int32 token ids.
            seeds: B seeds below 2**63; a completion depends on its prompt, its seed and the weights, not on the others.
        """

    def update_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Take new weights; `version` is the number of updates that made them."""

    def close(self) -> None:
        """Free memory and connections."""
