"""Completions, and the protocol of what samples them: token ids in, completions out."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gym_rm.errors import ConfigError

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


class CompletionStream(Protocol):
    """Completions that are handed over as they end, in any order. The weights must stay while some are open.

    An error in `add` or `take` closes the stream. A closed stream has nothing open, and may be used again.

    Attributes:
        in_waves: whether completions have the same bits only beside the same others: then a run that is to be repeated
            begins all that belong together in one `add`, while none is open.
    """

    in_waves: bool

    @property
    def num_open(self) -> int:
        """Number of completions that were begun and not returned."""

    def add(self, keys: Sequence[int], prompts: Sequence[TokenIds], *, seeds: Sequence[int]) -> None:
        """Begin a completion for each prompt; `Sampler.sample` says on what it depends.

        Args:
            keys: B names for them, such as rows; a name may come again once its completion was returned.
            prompts: B prompts, int32 token ids.
            seeds: B seeds below 2**63.

        Raises:
            ConfigError: a completion of this key is open.
        """

    def take(self, timeout: float | None = None) -> dict[int, Completion]:
        """Return the completions that ended since the last call, by key; empty if none is open.

        Args:
            timeout: seconds to wait for the first one, after which none is returned; None for no limit.
        """

    def close(self) -> None:
        """Cancel the open completions; closing twice is allowed."""


class Sampler(Protocol):
    """Anything that samples completions from the current policy, at the temperature of training."""

    def stream(self, *, calibrate: bool = True) -> CompletionStream:
        """Return a stream of completions.

        Args:
            calibrate: whether log-probabilities may be compared with the trainer's; False if it has other weights now.
        """

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


def sample_all(stream: CompletionStream, prompts: Sequence[TokenIds], *, seeds: Sequence[int]) -> list[Completion]:
    """Return one completion for each prompt, and close the stream."""
    completions: dict[int, Completion] = {}
    with contextlib.closing(stream):
        stream.add(range(len(prompts)), prompts, seeds=seeds)
        while stream.num_open:
            completions |= stream.take()
    return [completions[row] for row in range(len(prompts))]


def require_new(keys: Sequence[int], opened: Collection[int]) -> None:
    """Raise ConfigError if a key is open, or comes twice."""
    seen = set(opened)
    for key in keys:
        if key in seen:
            raise ConfigError(f"a completion of key {key} is open; take it before another one of this key begins.")
        seen.add(key)
