"""Which prompt an episode starts from, what the user says next, and when the conversation is over.

An `Episode` is the state of one conversation, a `Turn` is what a reply would make of it. Nothing here knows of rewards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from gymnasium.utils import seeding
from numpy.typing import NDArray

from gym_rm.errors import ConfigError
from gym_rm.types import Conversation, Message, Prompt

Responder: TypeAlias = Callable[[Conversation], str | None]


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


@dataclass(frozen=True, slots=True)
class Turn:
    """What one reply makes of an episode, before anything is changed.

    Attributes:
        messages: the conversation with the reply as its last message: what is scored.
        user: what the user says to it, None where the conversation ends here.
        terminated: the user has nothing more to say.
        truncated: the turn limit stopped a user who would have gone on, or the reply was too long.
    """

    messages: list[Message]
    user: str | None
    terminated: bool
    truncated: bool

    @property
    def ended(self) -> bool:
        """Whether the episode is over."""
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True)
class DialogueRules:
    """When a conversation goes on.

    Attributes:
        max_turns: replies after which an episode is truncated; None for as many as the user asks for.
        max_reply_length: characters above which a reply truncates its episode; None for no limit.
        respond: what the user says to a conversation, None to end it; takes the place of `Prompt.user_turns`.
    """

    max_turns: int | None = None
    max_reply_length: int | None = None
    respond: Responder | None = None

    def turn(self, episode: Episode, reply: str) -> Turn:
        """The turn that `reply` would be; the episode stays as it is."""
        messages: list[Message] = [*episode.messages, {"role": "assistant", "content": reply}]
        user = self._user(episode, messages)
        terminated = user is None
        out_of_turns = self.max_turns is not None and episode.num_replies + 1 >= self.max_turns
        too_long = self.max_reply_length is not None and len(reply) > self.max_reply_length
        truncated = too_long or (out_of_turns and not terminated)
        return Turn(messages, None if truncated else user, terminated, truncated)

    def _user(self, episode: Episode, messages: list[Message]) -> str | None:
        if self.respond is not None:
            return self.respond([message.copy() for message in messages])
        turns = episode.prompt.user_turns
        return turns[episode.num_replies] if episode.num_replies < len(turns) else None

    def commit(self, episode: Episode, turn: Turn) -> None:
        """Make the turn part of the episode."""
        # A new list: whoever was given the one of the turn may keep it.
        said: list[Message] = [] if turn.user is None else [{"role": "user", "content": turn.user}]
        episode.messages = [*turn.messages, *said]
        episode.num_replies += 1


class PromptOrder:
    """An endless walk through prompts: each epoch in a new order, no prompt twice within one.

    Several readers (the siblings of a group) walk the same order at their own pace. Takes memory for the prompts
    drawn in an epoch and for what the slowest reader is behind, not for a permutation per environment.

    Args:
        num_prompts: how many there are.
        generator: decides the order; one draw per prompt.
        num_readers: how many walk it.

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

    def align(self) -> None:
        """Move every reader up to the one that is furthest ahead."""
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
    """The prompt orders of N environments, of which every `group_size` neighbours walk the same one.

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
        """Start the orders of the mask `rows` anew, each from the seed of its first environment.

        None goes on with the order as it is; an order that has not begun gets a random seed.

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
                    "a seed starts the prompts of a whole group anew, but the reset_mask holds only a part of group "
                    f"{group}; reset all {self._group_size} environments of it, or reset without a seed."
                )
            fresh[group] = seeding.np_random(seed)
        for group, (generator, chosen) in fresh.items():
            self._orders[group] = PromptOrder(self._num_prompts, generator, num_readers=self._group_size)
            self._seeds[group] = chosen

    def align(self, rows: NDArray[np.bool_]) -> None:
        """Let the siblings of every group that is whole in `rows` go on from the same prompt."""
        for group in np.flatnonzero(rows.reshape(self.num_groups, self._group_size).all(axis=1)).tolist():
            self._orders[group].align()

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
