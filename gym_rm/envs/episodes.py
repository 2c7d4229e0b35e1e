"""Order of the prompts over the episodes, and the state of one conversation."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium.utils import seeding
from numpy.typing import NDArray

from gym_rm.checks import in_order
from gym_rm.data.tools import UNREADABLE
from gym_rm.errors import ConfigError
from gym_rm.types import Conversation, Message, Prompt


@dataclass(slots=True)
class Episode:
    """One conversation in progress. A step makes a new object and does not change this one.

    Attributes:
        prompt: prompt that the episode started from.
        number: number of earlier episodes in its prompt order.
        messages: all messages so far.
        num_replies: number of replies from the policy.
        score: score of the last one, NaN if it is missing; 0.0 before the first, and for one that was not scored.
    """

    prompt: Prompt
    number: int
    messages: list[Message]
    num_replies: int = 0
    score: float = 0.0


def num_user_turns(conversation: Conversation, prompt: Prompt) -> int:
    """Return the number of messages of the user after the prompt, without those about calls that cannot be read."""
    after = conversation[len(prompt.messages) :]
    return sum(message["role"] == "user" and not message["content"].startswith(UNREADABLE) for message in after)


def seed_of_each(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    """Derive N seeds from an int, a list or None, as `SyncVectorEnv` does."""
    if seed is None:
        return [None] * num_envs
    try:
        if isinstance(seed, int | np.integer):
            return [int(seed) + row for row in range(num_envs)]
        seeds = [None if each is None else operator.index(each) for each in in_order(seed)]  # type: ignore[union-attr]
    except TypeError as error:
        raise ConfigError(
            f"seed must be an integer, None, or a list of integers and None; got {seed!r:.80}."
        ) from error
    if len(seeds) != num_envs:
        raise ValueError(f"seed must have one entry for each of the {num_envs} environments, got {len(seeds)} entries.")
    return seeds


class PromptOrder:
    """An endless sequence of prompt indices; each epoch is a new permutation.

    Several environments (a group) read the same sequence at different speeds. The prompt at a place is always the same,
    also after an exception or an interrupt. Memory grows with the number of prompts drawn in an epoch and with the
    distance between the readers. No permutation is stored per environment.

    Args:
        num_prompts: number of prompts.
        generator: random generator of the order; one draw per prompt.
        seed: seed of the generator.
    """

    def __init__(self, num_prompts: int, generator: np.random.Generator, seed: int = -1) -> None:
        self.generator = generator
        self.seed = seed
        self._num_prompts = num_prompts
        self._place = 0  # place of the next draw
        self._choices: dict[int, int] = {}  # random numbers by place
        self._moved: dict[int, int] = {}  # entries of the shuffled list that differ from their position
        self._drawn: dict[int, int] = {}  # prompt indices by place

    def prompt(self, place: int, oldest: int = 0) -> int:
        """Return the index of the prompt at a place. Places before `oldest` must not be read again."""
        while self._place <= place:
            self._draw()
        while (first := next(iter(self._drawn))) < oldest:
            del self._drawn[first]
        return self._drawn[place]

    def _draw(self) -> None:
        """Take one step of a Fisher-Yates shuffle of `range(num_prompts)`; only the moved entries are stored.

        An interrupted draw is repeated by the next call with the same result: one call of C code draws and stores the
        random number, and all other statements can run twice.
        """
        place, size = self._place, self._num_prompts
        position = place % size
        if place not in self._choices:
            self._choices.update(zip((place,), map(self.generator.integers, (position,), (size,)), strict=True))
        choice = int(self._choices[place])
        if position == 0:
            self._moved.clear()
        if place not in self._drawn:
            self._drawn[place] = self._moved.get(choice, choice)
        self._moved[choice] = self._moved.get(position, position)
        self._place = place + 1
        self._choices.pop(place)
        self._moved.pop(position, None)


@dataclass(frozen=True, slots=True)
class PromptOrders:
    """The prompt orders of N environments, and the position of each environment in its order.

    Every `group_size` consecutive environments share one order. The methods return a new object, so that a step that
    raises changes nothing.

    Attributes:
        num_prompts, group_size: numbers of prompts, and of environments that share an order.
        orders: the order of each group; None before its first seed.
        numbers: int64 `[N]`, number of the next episode of each environment.
        places: int64 `[N]`, place of its next prompt in the order.
        oldest: int64 `[G]`, place in each order before which nothing is read again.
    """

    num_prompts: int
    group_size: int
    orders: tuple[PromptOrder | None, ...]
    numbers: NDArray[np.int64]
    places: NDArray[np.int64]
    oldest: NDArray[np.int64]

    @classmethod
    def of(cls, num_prompts: int, num_envs: int, group_size: int) -> PromptOrders:
        """Return orders without seeds."""
        numbers, places = np.zeros((2, num_envs), dtype=np.int64)
        num_groups = num_envs // group_size
        oldest = np.zeros(num_groups, dtype=np.int64)
        return cls(num_prompts, group_size, (None,) * num_groups, numbers, places, oldest)

    def seeded(self, seeds: Sequence[int | None], rows: NDArray[np.bool_]) -> PromptOrders:
        """Restart the orders of the groups in the mask `rows`, each from the seed of its first environment.

        The seed None continues an order. An order that has not started gets a random seed.

        Raises:
            ConfigError: `rows` contains only a part of a group that has a new seed.
        """
        fresh: dict[int, PromptOrder] = {}
        for group, members in enumerate(self._by_group(rows)):
            seed = seeds[group * self.group_size]
            if not members.any() or (seed is None and self.orders[group] is not None):
                continue
            self._require_whole(group, members, "seed")
            fresh[group] = PromptOrder(self.num_prompts, *seeding.np_random(seed))
        orders = tuple(fresh.get(group, order) for group, order in enumerate(self.orders))
        kept = np.array([group not in fresh for group in range(len(orders))])
        rows = np.repeat(kept, self.group_size)
        return replace(
            self, orders=orders, numbers=self.numbers * rows, places=self.places * rows, oldest=self.oldest * kept
        )

    def aligned(self, rows: NDArray[np.bool_]) -> PromptOrders:
        """Make all environments of a group continue at the same prompt, for each group that is completely in `rows`."""
        whole = self._by_group(rows).all(axis=1, keepdims=True)
        numbers, places = (
            np.where(whole, each.max(axis=1, keepdims=True), each).reshape(-1)
            for each in (self._by_group(self.numbers), self._by_group(self.places))
        )
        return replace(self, numbers=numbers, places=places)

    def check(self, indices: NDArray[Any], rows: NDArray[np.bool_]) -> None:
        """Check prompt indices for `next`.

        Raises:
            ConfigError: an index is out of range, `rows` contains only a part of a group, or the indices differ within
                a group.
        """
        for row in np.flatnonzero(rows & ((indices < 0) | (indices >= self.num_prompts))).tolist():
            raise ConfigError(f"prompt_indices[{row}] must be from 0 to {self.num_prompts - 1}, got {indices[row]}.")
        by_group = self._by_group(indices)
        for group, members in enumerate(self._by_group(rows)):
            if not members.any():
                continue
            self._require_whole(group, members, "prompt_indices")
            if (by_group[group] != by_group[group, 0]).any():
                raise ConfigError(
                    f"prompt_indices must be equal for all {self.group_size} environments of group {group}, got "
                    f"{by_group[group].tolist()}."
                )

    def next(
        self, rows: NDArray[np.bool_], indices: NDArray[Any] | None = None
    ) -> tuple[PromptOrders, list[tuple[int, int]]]:
        """Start the next episode of each environment in the mask `rows`.

        Args:
            rows: bool `[N]`.
            indices: checked indices of the prompts to start from, `[N]`; they do not change the random order. None for
                the next prompts of the orders.

        Returns:
            The new positions; and for each of these environments, the number of the episode and the index of its
            prompt.
        """
        listed = np.flatnonzero(rows).tolist()
        numbers = self.numbers[rows].tolist()
        if indices is not None:
            started = list(zip(numbers, indices[rows].tolist(), strict=True))
            return replace(self, numbers=self.numbers + rows), started
        places, oldest = self.places.tolist(), self.oldest.tolist()
        started = []
        for row, number in zip(listed, numbers, strict=True):
            group = row // self.group_size
            order = self.orders[group]
            assert order is not None  # the first reset seeds all groups
            started.append((number, order.prompt(places[row], oldest[group])))
        read = self._by_group(self.places).min(axis=1)
        return replace(self, numbers=self.numbers + rows, places=self.places + rows, oldest=read), started

    def each(self) -> list[PromptOrder]:
        """Return the order of each environment; the environments of a group share one."""
        return [order for order in self.orders if order is not None for _ in range(self.group_size)]

    def _require_whole(self, group: int, members: NDArray[np.bool_], name: str) -> None:
        if not members.all():
            raise ConfigError(
                f"{name} is for whole groups, but reset_mask has only a part of group {group}; reset all "
                f"{self.group_size} environments of the group, or leave {name} out."
            )

    def _by_group(self, column: NDArray[Any]) -> NDArray[Any]:
        return column.reshape(len(self.orders), self.group_size)
