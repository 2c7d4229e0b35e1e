"""Which prompt an episode starts from, and the state of one conversation. Nothing here knows of rewards."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gymnasium.utils import seeding
from numpy.typing import NDArray

from gym_rm.errors import ConfigError
from gym_rm.types import Message, Prompt


@dataclass(slots=True)
class Episode:
    """One conversation in progress.

    Attributes:
        prompt: where it started.
        number: how many episodes of its prompt order came before it.
        messages: everything said so far.
        num_replies: assistant turns that the policy has taken.
    """

    prompt: Prompt
    number: int
    messages: list[Message]
    num_replies: int = 0

    def with_reply(self, reply: str) -> list[Message]:
        """The conversation with one more reply; the episode does not change."""
        return [*self.messages, {"role": "assistant", "content": reply}]


def seed_of_each(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    """N seeds, as `SyncVectorEnv` derives them from an int, a list or None."""
    if seed is None:
        return [None] * num_envs
    try:
        if isinstance(seed, int | np.integer):
            return [int(seed) + row for row in range(num_envs)]
        seeds = [None if each is None else operator.index(each) for each in seed]
    except TypeError as error:
        raise ConfigError(f"seed must be an integer or None, or a list of those; got {seed!r:.80}.") from error
    if len(seeds) != num_envs:
        raise ValueError(f"a list of seeds must have one for each of the {num_envs} environments, got {len(seeds)}.")
    return seeds


class PromptOrder:
    """An endless sequence of prompt indices: each epoch is a new permutation.

    Several readers (the siblings of a group) read the same sequence at their own pace. Memory grows with the prompts
    drawn in an epoch and with the distance between readers; no permutation is stored per environment.

    Args:
        num_prompts: how many prompts there are.
        generator: decides the order; one draw per prompt.
        num_readers: how many read it.

    Example:
        >>> order = PromptOrder(3, np.random.default_rng(0), num_readers=2)
        >>> first = [order.next(0)[1] for _ in range(3)]
        >>> sorted(first), first == [order.next(1)[1] for _ in range(3)]
        ([0, 1, 2], True)
    """

    def __init__(self, num_prompts: int, generator: np.random.Generator, *, num_readers: int = 1) -> None:
        self.generator = generator
        self._num_prompts = num_prompts
        self._position = 0
        self._moved: dict[int, int] = {}
        self._waiting: deque[int] = deque()
        self._first_waiting = 0
        self._next = [0] * num_readers

    def next(self, reader: int = 0) -> tuple[int, int]:
        """The number of the reader's next episode and the index of its prompt."""
        number = self._next[reader]
        self._next[reader] += 1
        if number == self._first_waiting + len(self._waiting):
            self._waiting.append(self._draw())
        index = self._waiting[number - self._first_waiting]
        self._forget()
        return number, index

    def insert(self, index: int) -> None:
        """Let every reader's next episode start at this prompt; the draws go on afterwards as if it had not been."""
        self.align()
        self._waiting.append(index)

    def align(self) -> None:
        """Move every reader to the position of the furthest one."""
        self._next = [max(self._next)] * len(self._next)
        self._forget()

    def _forget(self) -> None:
        while self._waiting and min(self._next) > self._first_waiting:
            self._waiting.popleft()
            self._first_waiting += 1

    def _draw(self) -> int:
        """One step of a Fisher-Yates shuffle of `range(num_prompts)` that stores only what has moved."""
        if self._position == self._num_prompts:
            self._position = 0
        position = self._position
        choice = int(self.generator.integers(position, self._num_prompts))
        drawn = self._moved.get(choice, choice)
        self._moved[choice] = self._moved.get(position, position)
        self._moved.pop(position, None)
        self._position += 1
        return drawn


class PromptOrders:
    """The prompt orders of N environments; every `group_size` neighbours share one.

    Attributes:
        num_groups: how many orders there are.
    """

    def __init__(self, num_prompts: int, num_envs: int, group_size: int) -> None:
        self.num_groups = num_envs // group_size
        self._num_prompts = num_prompts
        self._group_size = group_size
        self._orders: dict[int, PromptOrder] = {}
        self._seeds: dict[int, int] = {}

    def seed(self, seeds: Sequence[int | None], rows: NDArray[np.bool_]) -> None:
        """Restart the orders of the mask `rows`, each from the seed of its first environment.

        None continues the order; an order that has not begun gets a random seed.

        Raises:
            ConfigError: a seed for a group of which only a part is in `rows`.
        """
        fresh = {}
        for group, members in enumerate(rows.reshape(self.num_groups, self._group_size)):
            seed = seeds[group * self._group_size]
            if not members.any() or (seed is None and group in self._orders):
                continue
            if not members.all():
                raise ConfigError(
                    "a seed restarts the prompts of a whole group, but the reset_mask holds only a part of group "
                    f"{group}; reset all {self._group_size} environments of it, or reset without a seed."
                )
            fresh[group] = seeding.np_random(seed)
        for group, (generator, chosen) in fresh.items():
            self._orders[group] = PromptOrder(self._num_prompts, generator, num_readers=self._group_size)
            self._seeds[group] = chosen

    def align(self, rows: NDArray[np.bool_]) -> None:
        """Let the siblings of every group that is whole in `rows` continue at the same prompt."""
        for group in np.flatnonzero(rows.reshape(self.num_groups, self._group_size).all(axis=1)).tolist():
            self._orders[group].align()

    def insert(self, indices: NDArray[np.int64], rows: NDArray[np.bool_]) -> None:
        """Let the next episodes of the mask `rows` start at the prompts with these indices, both `[N]`.

        Raises:
            ConfigError: an index out of range, a part of a group, or siblings that would start at different prompts.
        """
        for row in np.flatnonzero(rows & ((indices < 0) | (indices >= self._num_prompts))).tolist():
            raise ConfigError(
                f"prompt_indices[{row}] must be an index into the {self._num_prompts} prompts, got {indices[row]}."
            )
        chosen = {}
        for group, members in enumerate(rows.reshape(self.num_groups, self._group_size)):
            mine = indices.reshape(self.num_groups, self._group_size)[group]
            if not members.any():
                continue
            if not members.all() or (mine != mine[0]).any():
                raise ConfigError(
                    f"prompt_indices must start all {self._group_size} environments of group {group} at the same "
                    f"prompt, got {mine[members].tolist()} for {int(members.sum())} of them."
                )
            chosen[group] = int(mine[0])
        for group, index in chosen.items():
            self._orders[group].insert(index)

    def next(self, row: int) -> tuple[int, int]:
        """The number of the environment's next episode and the index of its prompt."""
        group, sibling = divmod(row, self._group_size)
        return self._orders[group].next(sibling)

    @property
    def generators(self) -> tuple[np.random.Generator, ...]:
        """The generator behind each environment's order, the same for siblings."""
        self._begin()
        return tuple(order.generator for _, order in sorted(self._orders.items()) for _ in range(self._group_size))

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each environment's order."""
        self._begin()
        return tuple(seed for _, seed in sorted(self._seeds.items()) for _ in range(self._group_size))

    def _begin(self) -> None:
        num_envs = self.num_groups * self._group_size
        self.seed([None] * num_envs, np.ones(num_envs, dtype=np.bool_))
