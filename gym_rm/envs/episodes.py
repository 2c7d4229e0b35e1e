"""Order of the prompts over the episodes, and the state of one conversation."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.utils import seeding
from numpy.typing import NDArray

from gym_rm.errors import ConfigError
from gym_rm.types import Message, Prompt


@dataclass(slots=True)
class Episode:
    """One conversation in progress.

    Attributes:
        prompt: prompt that the episode started from.
        number: number of earlier episodes in its prompt order.
        messages: all messages so far.
        num_replies: number of replies from the policy.
    """

    prompt: Prompt
    number: int
    messages: list[Message]
    num_replies: int = 0

    def with_reply(self, reply: str) -> list[Message]:
        """Return the conversation with one more reply, without changing the episode."""
        return [*self.messages, {"role": "assistant", "content": reply}]


def seed_of_each(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    """Derive N seeds from an int, a list or None, as `SyncVectorEnv` does."""
    if seed is None:
        return [None] * num_envs
    try:
        if isinstance(seed, int | np.integer):
            return [int(seed) + row for row in range(num_envs)]
        seeds = [None if each is None else operator.index(each) for each in seed]
    except TypeError as error:
        raise ConfigError(
            f"seed must be an integer, None, or a list of integers and None; got {seed!r:.80}."
        ) from error
    if len(seeds) != num_envs:
        raise ValueError(f"seed must have one entry for each of the {num_envs} environments, got {len(seeds)} entries.")
    return seeds


class PromptOrder:
    """An endless sequence of prompt indices; each epoch is a new permutation.

    Several readers (the environments of a group) read the same sequence at different speeds. Memory grows with the
    number of prompts drawn in an epoch and with the distance between the readers. No permutation is stored per
    environment.

    Args:
        num_prompts: number of prompts.
        generator: random generator of the order; one draw per prompt.
        num_readers: number of readers.

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
        """Return the number of the reader's next episode and the index of its prompt."""
        number = self._next[reader]
        self._next[reader] += 1
        if number == self._first_waiting + len(self._waiting):
            self._waiting.append(self._draw())
        index = self._waiting[number - self._first_waiting]
        self._drop_read()
        return number, index

    def insert(self, index: int) -> None:
        """Start the next episode of every reader from this prompt. The random order of the others does not change."""
        self.align()
        self._waiting.append(index)

    def align(self) -> None:
        """Move every reader to the position of the furthest reader."""
        self._next = [max(self._next)] * len(self._next)
        self._drop_read()

    def _drop_read(self) -> None:
        while self._waiting and min(self._next) > self._first_waiting:
            self._waiting.popleft()
            self._first_waiting += 1

    def _draw(self) -> int:
        """Take one step of a Fisher-Yates shuffle of `range(num_prompts)`; only the moved entries are stored."""
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
    """The prompt orders of N environments; every `group_size` consecutive environments share one order.

    Attributes:
        num_groups: number of prompt orders.
    """

    def __init__(self, num_prompts: int, num_envs: int, group_size: int) -> None:
        self.num_groups = num_envs // group_size
        self._num_prompts = num_prompts
        self._group_size = group_size
        self._orders: dict[int, PromptOrder] = {}
        self._seeds: dict[int, int] = {}

    def seed(self, seeds: Sequence[int | None], rows: NDArray[np.bool_]) -> None:
        """Restart the orders of the groups in the mask `rows`, each from the seed of its first environment.

        The seed None continues an order. An order that has not started gets a random seed.

        Raises:
            ConfigError: `rows` contains only a part of a group that has a new seed.
        """
        fresh = {}
        for group, members in enumerate(rows.reshape(self.num_groups, self._group_size)):
            seed = seeds[group * self._group_size]
            if not members.any() or (seed is None and group in self._orders):
                continue
            if not members.all():
                raise ConfigError(
                    f"seed restarts the prompts of a whole group, but reset_mask has only a part of group {group}; "
                    f"reset all {self._group_size} environments of the group, or reset without a seed."
                )
            fresh[group] = seeding.np_random(seed)
        for group, (generator, chosen) in fresh.items():
            self._orders[group] = PromptOrder(self._num_prompts, generator, num_readers=self._group_size)
            self._seeds[group] = chosen

    def align(self, rows: NDArray[np.bool_]) -> None:
        """Make all environments of a group continue at the same prompt, for each group that is completely in `rows`."""
        for group in np.flatnonzero(rows.reshape(self.num_groups, self._group_size).all(axis=1)).tolist():
            self._orders[group].align()

    def check(self, indices: NDArray[Any], rows: NDArray[np.bool_]) -> None:
        """Check the arguments of `insert`.

        Raises:
            ConfigError: an index is out of range, `rows` contains only a part of a group, or the indices differ within
                a group.
        """
        for row in np.flatnonzero(rows & ((indices < 0) | (indices >= self._num_prompts))).tolist():
            raise ConfigError(f"prompt_indices[{row}] must be from 0 to {self._num_prompts - 1}, got {indices[row]}.")
        by_group = indices.reshape(self.num_groups, self._group_size)
        for group, members in enumerate(rows.reshape(self.num_groups, self._group_size)):
            if members.any() and not members.all():
                raise ConfigError(
                    f"prompt_indices needs whole groups, but reset_mask has only a part of group {group}; reset all "
                    f"{self._group_size} environments of the group."
                )
            if members.any() and (by_group[group] != by_group[group, 0]).any():
                raise ConfigError(
                    f"prompt_indices must be equal for all {self._group_size} environments of group {group}, got "
                    f"{by_group[group].tolist()}."
                )

    def insert(self, indices: NDArray[Any], rows: NDArray[np.bool_]) -> None:
        """Start the next episodes of the mask `rows` from the prompts with these checked indices; both are `[N]`."""
        for group in np.flatnonzero(rows.reshape(self.num_groups, self._group_size).any(axis=1)).tolist():
            self._orders[group].insert(int(indices[group * self._group_size]))

    def next(self, row: int) -> tuple[int, int]:
        """Return the number of the environment's next episode and the index of its prompt."""
        group, sibling = divmod(row, self._group_size)
        return self._orders[group].next(sibling)

    @property
    def generators(self) -> tuple[np.random.Generator, ...]:
        """Random generator of each environment's prompt order; the environments of a group share one."""
        self._begin()
        return tuple(order.generator for _, order in sorted(self._orders.items()) for _ in range(self._group_size))

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seed of each environment's prompt order."""
        self._begin()
        return tuple(seed for _, seed in sorted(self._seeds.items()) for _ in range(self._group_size))

    def _begin(self) -> None:
        num_envs = self.num_groups * self._group_size
        self.seed([None] * num_envs, np.ones(num_envs, dtype=np.bool_))
