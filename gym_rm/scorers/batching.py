"""Merge concurrent calls of a scorer into batches, because one call with many conversations is faster.

HTTP requests, environment threads and reward coroutines request single scores at the same time. One thread collects
the waiting requests, scores them in one call, and returns the rows of each request to its caller.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from gym_rm.checks import finite, integer
from gym_rm.engine.text.messages import CHARACTERS_PER_TOKEN
from gym_rm.errors import ConfigError, brief
from gym_rm.scorer import (
    CALLS_THAT_WAIT,
    Scorer,
    check_rows,
    is_relative,
    lock_open_after_fork,
    try_score,
)
from gym_rm.scorers.load import acquire_scorer
from gym_rm.scorers.merged_calls import MergedCalls
from gym_rm.scores import Scores, ScoringError
from gym_rm.types import Conversation, Prompt, Prompts

MAX_BATCH_SIZE = 1024  # conversations


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    """Conversations and prompts of one caller, and the future that receives the scores."""

    conversations: Sequence[Conversation]
    prompts: Prompts
    future: Future[Scores] = field(default_factory=Future)

    def begin(self) -> bool:
        """Mark it as begun, and return whether it is to be answered."""
        begun = self.future.running() or wait([self.future], timeout=0).done
        return not begun and self.future.set_running_or_notify_cancel()

    def cancel(self) -> None:
        """Cancel the future, and tell those that wait for it."""
        if self.future.cancel():
            self.future.set_running_or_notify_cancel()


class MicroBatchingScorer:
    """Scorer that accepts calls from any number of threads and merges concurrent calls.

    An error is raised only in the call that caused it. A missing score raises ScoringError in the call that contains
    the row. After any other exception, the merged requests are scored again one by one.

    Args:
        scorer: scorer of the merged calls; it is called from one thread only.
        max_batch_size: number of conversations at which a batch is complete; a request is never split.
        max_wait: seconds that the first request of a batch waits for others. This matters only if the scorer is idle,
            because requests also collect while the previous batch is scored.

    Example:
        >>> import gym_rm
        >>> scorer = MicroBatchingScorer(gym_rm.load_scorer(lambda conversations: [len(c) for c in conversations]))
        >>> scorer.score([[{"role": "user", "content": "Hi"}]]).rewards.tolist()
        [1.0]
        >>> scorer.close()
    """

    max_concurrent_calls = CALLS_THAT_WAIT

    def __init__(self, scorer: Scorer, *, max_batch_size: int = MAX_BATCH_SIZE, max_wait: float = 0.005) -> None:
        if not isinstance(scorer, Scorer):
            raise ConfigError(f"scorer must have a method score, got {scorer!r:.100}; pass load_scorer(...).")
        if finite("max_wait", max_wait) < 0:
            raise ConfigError(f"max_wait must not be negative, got {max_wait}.")
        self.scorer = scorer
        self.num_batches = 0
        self.num_conversations = 0
        self._calls: MergedCalls[ScoreRequest] = MergedCalls(
            self._answer,
            lambda request: len(request.conversations),
            max_size=integer("max_batch_size", max_batch_size, minimum=1),
            max_wait=max_wait,
            name="MicroBatchingScorer",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> MicroBatchingScorer:
        """Return the scorer itself: `gym.make_vec` deep-copies its keywords, and a copy could not merge calls."""
        return self

    def __repr__(self) -> str:
        return f"MicroBatchingScorer({self.scorer!r})"

    def submit(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Future[Scores]:
        """Request scores and return a future without waiting; `asyncio.wrap_future` makes it awaitable."""
        check_rows(conversations, prompts)
        request = ScoreRequest(conversations, prompts)
        self._calls.put(request)
        return request.future

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Score N conversations together with other waiting requests; raises only the errors of these conversations."""
        if self._calls.is_own_thread():
            raise RuntimeError("the scorer of this MicroBatchingScorer called it, and would wait for itself.")
        return self.submit(conversations, prompts).result()

    async def score_async(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Score N conversations as `score`, without blocking the event loop; works from any number of loops.

        A cancelled call is not scored if it has not begun.
        """
        return await asyncio.wrap_future(self.submit(conversations, prompts))

    @property
    def respond(self) -> Any:
        """The scorer's own user simulator, or None."""
        return getattr(self.scorer, "respond", None)

    def close(self) -> None:
        """Score the waiting requests, then stop. May be called several times."""
        self._calls.close()

    def _answer(self, batch: list[ScoreRequest]) -> None:
        for requests in [[request] for request in batch] if is_relative(self.scorer) else [batch]:
            answer(requests, self._score)

    def _score(self, conversations: Sequence[Conversation], prompts: Prompts) -> Scores:
        self.num_batches += 1
        self.num_conversations += len(conversations)
        try:
            return try_score(self.scorer, conversations, prompts)
        except Exception:
            raise
        except BaseException as error:  # this thread must go on
            raise RuntimeError(f"the scorer raised {brief(error)}") from error


def answer(requests: Sequence[ScoreRequest], score: Callable[[Sequence[Conversation], Prompts], Scores]) -> None:
    """Score requests in one call, and give each its rows, or ScoringError if one of them has no score.

    After an exception they are scored one by one, so that it is raised only in the request that caused it.

    Args:
        requests: what nobody else answers.
        score: as `try_score`. An interrupt ends it, and leaves requests without an answer.
    """
    conversations = [conversation for request in requests for conversation in request.conversations]
    prompts: list[Prompt | None] | None = None
    if any(request.prompts is not None for request in requests):
        prompts = []
        for request in requests:
            prompts += [None] * len(request.conversations) if request.prompts is None else request.prompts
    try:
        scores = score(conversations, prompts)
    except Exception as error:
        if len(requests) == 1:
            requests[0].future.set_exception(error)
            return
        for request in requests:
            answer([request], score)
        return
    stop = 0
    for request in requests:
        start, stop = stop, stop + len(request.conversations)
        rows = scores[start:stop]
        if rows.failed_rows:
            request.future.set_exception(ScoringError(rows))
        else:
            request.future.set_result(rows)


class SerialCalls:
    """Calls of a scorer from several threads, one at a time: those that wait for it are merged into one.

    The caller whose turn it is scores the rows of all that wait, the others find their scores when it is theirs.
    """

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self._waiting: list[ScoreRequest] = []
        self._calling = False
        self._lock = lock_open_after_fork()
        if hasattr(scorer, "executor") and (device := getattr(getattr(scorer, "provenance", None), "device", None)):
            self._lock = _device_locks.setdefault(device, self._lock)  # models that share a device take turns

    def __reduce__(self) -> tuple[Any, ...]:
        return serial_calls, (self.scorer,)

    def try_score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Score N conversations as `gym_rm.scorer.try_score`, once no other call of the scorer runs."""
        request = ScoreRequest(conversations, prompts)
        self._waiting.append(request)
        try:
            with self._lock:
                if not request.future.done():
                    outer, self._calling = self._calling, True
                    try:
                        if outer or len(requests := self._merged(request)) == 1:  # a scorer that calls itself
                            return try_score(self.scorer, conversations, prompts)
                        answer(requests, functools.partial(try_score, self.scorer))
                    finally:
                        self._calling = outer
            return request.future.result()
        except ScoringError as error:
            return error.scores
        finally:
            self._waiting.remove(request)

    def _merged(self, first: ScoreRequest) -> list[ScoreRequest]:
        """Return a request and those that wait, as far as they fit in one call."""
        others = [] if is_relative(self.scorer) else self._waiting[:]
        others = [each for each in others if each is not first and not each.future.done()]
        if not others:
            return [first]
        requests: list[ScoreRequest] = []
        budget = getattr(self.scorer, "max_num_batched_tokens", None)
        characters = math.inf if budget is None else CHARACTERS_PER_TOKEN * budget
        num_rows, texts = 0, set[str]()
        for request in (first, *others):
            num_rows += len(request.conversations)
            texts |= {str(message.get("content")) for each in request.conversations for message in each}
            if requests and (num_rows > MAX_BATCH_SIZE or sum(map(len, texts)) > characters):
                break
            requests.append(request)
        return requests


_serial: weakref.WeakValueDictionary[int, SerialCalls] = weakref.WeakValueDictionary()
_device_locks: dict[str, threading.RLock] = {}


def serial_calls(scorer: Scorer) -> SerialCalls:
    """Return the calls of this scorer, which all that combine it share."""
    with _batching_lock:
        return _serial.setdefault(id(scorer), SerialCalls(scorer))


_batching: dict[int, tuple[Any, MicroBatchingScorer]] = {}
_batching_lock = lock_open_after_fork()


def shared_batching_scorer(reward_model: Any, options: Mapping[str, Any]) -> MicroBatchingScorer:
    """Return the `MicroBatchingScorer` of this process for these settings, or for this object.

    Libraries that create many objects with the same configuration share one scorer. It stays open until the process
    ends.
    """
    if isinstance(reward_model, MicroBatchingScorer):
        return reward_model
    with _batching_lock:
        shared = reward_model
        if reward_model is None or isinstance(reward_model, str | os.PathLike | Mapping):
            shared = acquire_scorer(_plain(reward_model), _plain(options))
        # The shared object is stored too, so that its id is not reused for another object.
        if id(shared) not in _batching:
            scorer = shared if shared is not reward_model else acquire_scorer(reward_model, options)
            _batching[id(shared)] = (shared, MicroBatchingScorer(scorer))
        return _batching[id(shared)][1]


def _plain(value: Any) -> Any:
    """Convert dicts and lists of a configuration library to plain Python ones, and paths to texts."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
