"""The `Scorer` protocol: conversations in, `Scores` out; and what holds for all of them."""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np

from gym_rm.checks import describe, integer
from gym_rm.errors import ConfigError
from gym_rm.scores import Scores, ScoringError
from gym_rm.types import Conversation, Prompt, Prompts, Provenance


@runtime_checkable
class Scorer(Protocol):
    """Protocol for objects that score conversations.

    `score` returns one entry per conversation, in order. It raises `ScoringError`, which contains the other scores, if
    a score is missing. It returns empty `Scores` for an empty list. `gym_rm.testing.check_scorer` checks an
    implementation.
    """

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Score N conversations.

        Args:
            conversations: N lists of messages.
            prompts: the data rows that the conversations started from: a `Prompt` or None for each, or None if there
                are none. A reward model ignores them; a verifier compares replies with their `answer`. Conversations
                and prompts belong to the caller and must not be changed.
        """
        ...


class NeverCopied:
    """Base class of objects with a model, processes or connections; `gym.make_vec` deep-copies its keywords."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


RewardFunction: TypeAlias = Callable[..., Any]
"""Function of `(conversations)` or `(conversations, prompts)` that returns N numbers, None for a missing score, or of
`(conversation)` or `(conversation, prompt)` that returns one; it may be `async def`."""

ScorerLike: TypeAlias = "str | os.PathLike[str] | Sequence[str] | Mapping[str, Any] | Scorer | RewardFunction | None"


def try_score(scorer: Scorer, conversations: Sequence[Conversation], prompts: Prompts = None, **options: Any) -> Scores:
    """Score N conversations, and return failures in `Scores.errors` instead of raising ScoringError.

    A reward that is not finite gets an error.

    Raises:
        ConfigError: the scorer did not return `Scores` with N rows.
    """
    try:
        scores = scorer.score(conversations, prompts, **options)
    except ScoringError as error:
        scores = error.scores
    except Exception as error:
        error.add_note(f"raised by the scorer {describe(scorer)}")
        raise
    name = type(scorer).__name__
    if not isinstance(scores, Scores):
        raise ConfigError(
            f"{name}.score returned {describe(scores)}, expected gym_rm.Scores; return Scores.from_rewards(numbers)."
        )
    if len(scores) != len(conversations):
        raise ConfigError(
            f"{name}.score returned {len(scores)} scores for {len(conversations)} conversations; a scorer "
            "must return one for each, in order."
        )
    return scores.mark_failures()


def is_relative(scorer: Any) -> bool:
    """Return whether rewards depend on the other rows of a call, which must then have whole groups and no others."""
    return bool(getattr(scorer, "relative", False))


CALLS_THAT_WAIT = 32
"""`max_concurrent_calls` of scorers whose calls mostly wait, for a server, for processes or for coroutines."""


def max_concurrent_calls(scorer: Any, default: int = 1) -> int:
    """Return how many calls of `score` may run at the same time, in threads of their own.

    A scorer, or a reward function, can say so in an attribute of this name. 0: only in the thread of the caller, for
    example a model on a CPU, where nothing is gained, or a function that uses `signal.alarm`.

    Raises:
        ConfigError: it is no number of calls.
    """
    given = getattr(scorer, "max_concurrent_calls", default)
    return integer(f"max_concurrent_calls of {type(scorer).__name__}", given, minimum=0)


def route_of(scorer: Scorer, prompt: Prompt | None) -> str | None:
    """Return the route of a data row: rows with different ones need not be in one call. None if there are no routes."""
    method = getattr(scorer, "route_of", None)
    return method(prompt) if callable(method) else None


def provenance_of(scorer: Scorer) -> Provenance | None:
    """Return how a scorer scores, before it has scored anything; None if it does not say."""
    return getattr(scorer, "provenance", None) or try_score(scorer, []).provenance


_locks: weakref.WeakSet[threading.RLock] = weakref.WeakSet()


def lock_open_after_fork() -> threading.RLock:
    """Return a lock that is open in a forked process if another thread had it, which does not exist there."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _open_locks() -> None:
    for lock in list(_locks):
        if lock.acquire(blocking=False):
            lock.release()
        else:
            lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_open_locks)


CONVERSATIONS = "conversations must be a list of conversations, each a list of {'role', 'content'} messages"


def check_rows(conversations: Sequence[Conversation], prompts: Prompts) -> None:
    """Raise ConfigError if the arguments of a `score` call are not lists, or not of the same length."""
    if not _is_list(conversations):
        raise ConfigError(f"{CONVERSATIONS}; got {describe(conversations)}.")
    if prompts is not None and (not _is_list(prompts) or len(prompts) != len(conversations)):
        got = f"{len(prompts)} entries" if _is_list(prompts) else describe(prompts)
        raise ConfigError(f"prompts must have one entry per conversation, got {got} for {len(conversations)}.")


def check_conversations(conversations: Sequence[Conversation], prompts: Prompts) -> None:
    """Raise ConfigError like `check_rows`, and if a conversation is not a list of messages."""
    check_rows(conversations, prompts)
    row: int
    given: Any
    for row, given in enumerate(conversations):
        if type(given) in (list, tuple) and {*map(type, given)} <= {dict}:
            continue  # as almost always
        if isinstance(given, Mapping) and "role" in given:
            raise ConfigError(f"{CONVERSATIONS}; got a message in row {row}; if it is one conversation, pass [it].")
        listed = isinstance(given, Sequence) and _is_list(given)
        wrong = [each for each in given if not isinstance(each, Mapping)] if listed else [given]
        if wrong:
            raise ConfigError(f"{CONVERSATIONS}; got {describe(wrong[0])} in row {row}.")


def _is_list(value: Any) -> bool:
    """Return whether this is a list, tuple or array, and no text."""
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes | bytearray)


def check_signature(scorer: Scorer) -> None:
    """Raise ConfigError if the scorer's `score` does not accept prompts as its second argument."""
    try:
        inspect.signature(scorer.score).bind([], None)
    except TypeError as error:
        raise ConfigError(
            f"{type(scorer).__name__}.score must take (conversations, prompts=None): {error}; a scorer that does not "
            "need the prompts ignores them."
        ) from error
    except ValueError:  # builtins can have no signature
        return
