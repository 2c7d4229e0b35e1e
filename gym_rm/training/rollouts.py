"""What a policy wrote in a step: the episodes of an environment, and the completions that they consist of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gym_rm.generation.completions import Completion, TokenIds
from gym_rm.types import Conversation


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply in an episode. The policy learns from exactly the tokens that it sampled, after what it saw then.

    Attributes:
        prompt: int32 `[P]`, what the policy saw: the conversation in its template.
        completion: what it replied.
        reward: reward of this reply: 0 if it was not scored, NaN if its score is missing.
    """

    prompt: TokenIds
    completion: Completion
    reward: float


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode of a step.

    Attributes:
        row: its number among the episodes of the step on all ranks.
        group: number of its prompt in the step; the episodes of a group are compared.
        prompt_id: id of the prompt.
        answer: reference answer, or None.
        conversation: the whole conversation.
        turns: the replies.
        components: sums of the components of the reward, by name.
        attempt: number of times that its group was replaced, by dynamic sampling.
        verdicts: the verdict of each verifier on the last reply that it scored.
    """

    row: int
    group: int
    prompt_id: str
    answer: str | None
    conversation: Conversation
    turns: tuple[Turn, ...]
    components: Mapping[str, float]
    attempt: int = 0
    verdicts: Mapping[str, str] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        """Sum of the rewards of the turns; NaN if a score is missing."""
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def finished(self) -> bool:
        """Whether every reply ended with an end token."""
        return all(turn.completion.finished for turn in self.turns)


@dataclass(frozen=True)
class Samples:
    """What this rank's episodes say: M turns, N tokens.

    Attributes:
        episodes: the episodes.
        turns: their turns, one episode after the other.
        owners: index of each turn's episode `[M]`.
        groups: group of each turn `[M]`.
        lengths: sampled tokens of each turn `[M]`.
    """

    episodes: Sequence[Episode]
    turns: list[Turn]
    owners: NDArray[Any]
    groups: NDArray[Any]
    lengths: NDArray[Any]

    @staticmethod
    def of(episodes: Sequence[Episode]) -> Samples:
        """Return the samples of episodes."""
        turns = [turn for episode in episodes for turn in episode.turns]
        owners = np.repeat(np.arange(len(episodes)), [len(episode.turns) for episode in episodes])
        lengths = np.array([len(turn.completion.token_ids) for turn in turns])
        return Samples(episodes, turns, owners, np.array([e.group for e in episodes])[owners], lengths)

    def column(self, name: str) -> NDArray[Any]:
        """Return an attribute of the episodes."""
        return np.array([getattr(episode, name) for episode in self.episodes])

    def tokens_of(self, turns: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
        """Return the indices of the tokens of some turns."""
        ends = np.cumsum(self.lengths)
        return np.concatenate([np.arange(ends[turn] - self.lengths[turn], ends[turn]) for turn in turns])

    def in_order(self, turns: Sequence[Sequence[int]], values: Sequence[Tensor]) -> NDArray[np.float32]:
        """Return the values of all tokens `[N]` in the order of turns, given those of the turns of each micro-batch."""
        found = np.empty(self.lengths.sum(), np.float32)
        for of_batch, each in zip(turns, values, strict=True):
            found[self.tokens_of(of_batch)] = each.float().cpu().numpy()
        return found


def to_plain(episode: Episode) -> dict[str, Any]:
    """Return an episode as values of JSON, for a checkpoint."""
    return dataclasses.asdict(episode, dict_factory=lambda items: {name: _plain(value) for name, value in items})


def from_plain(values: Mapping[str, Any]) -> Episode:
    """Return the episode of `to_plain`."""
    turns = []
    for turn in values["turns"]:
        given = turn["completion"]
        completion = Completion(
            np.array(given["token_ids"], dtype=np.int32),
            np.array(given["log_probs"], dtype=np.float32),
            given["finished"],
            given["text"],
        )
        turns.append(Turn(np.array(turn["prompt"], dtype=np.int32), completion, turn["reward"]))
    return Episode(**{**values, "turns": tuple(turns)})


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
