"""Many callers with one conversation each, one scorer that is fast only on many: merge the calls.

HTTP requests, environment threads and reward coroutines ask for single scores at the same time. One thread collects
what is waiting, scores it in one call, and gives every caller its rows.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from gym_rm.errors import ConfigError, ScoringError
from gym_rm.scorer import Scorer, acquire_scorer, try_score
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Prompt, Prompts


@dataclass(frozen=True, slots=True)
class Request:
    """Conversations of one caller with their prompts, and where the scores go."""

    conversations: Sequence[Conversation]
    prompts: Prompts
    future: Future[Scores] = field(default_factory=Future)


class MicroBatchingScorer:
    """A scorer that may be called from any number of threads, and merges the calls that arrive together.

    A failure stays with its caller: rows without a score raise in the call that they came from, and after any other
    exception the merged requests are scored one by one.

    Args:
        scorer: what scores; it is only ever called from one thread.
        max_batch_size: conversations after which a batch is closed; a request is never split.
        max_wait: seconds that a first request waits for others. While a batch is being scored the next one fills up
            by itself, so this matters only when the scorer is idle.

    Example:
        >>> import gym_rm
        >>> scorer = MicroBatchingScorer(gym_rm.load_scorer(lambda conversations: [len(c) for c in conversations]))
        >>> scorer.score([[{"role": "user", "content": "Hi"}]]).rewards.tolist()
        [1.0]
        >>> scorer.close()
    """

    def __init__(self, scorer: Scorer, *, max_batch_size: int = 1024, max_wait: float = 0.005) -> None:
        if max_batch_size < 1 or max_wait < 0:
            raise ConfigError(
                "max_batch_size must be at least 1 and max_wait not negative, "
                f"got max_batch_size={max_batch_size} and max_wait={max_wait}."
            )
        self.scorer = scorer
        self.num_batches = 0
        self.num_conversations = 0
        self._max_batch_size = max_batch_size
        self._max_wait = max_wait
        self._waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> MicroBatchingScorer:
        """Itself: `gym.make_vec` deep-copies its keywords, and a copy would merge nothing."""
        return self

    def submit(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Future[Scores]:
        """Ask for scores without waiting; `asyncio.wrap_future` makes the result awaitable."""
        if prompts is not None and len(prompts) != len(conversations):
            raise ConfigError(
                f"score got {len(prompts)} prompts for {len(conversations)} conversations; expected one for each."
            )
        request = Request(conversations, prompts)
        with self._lock:
            if self._closed:
                raise RuntimeError("this MicroBatchingScorer is closed; make a new one.")
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="gym_rm micro-batching", daemon=True)
                self._thread.start()
            self._waiting.put(request)
        return request.future

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Score N conversations, together with whatever else is waiting; raises what the scorer raises for them."""
        return self.submit(conversations, prompts).result()

    def close(self) -> None:
        """Score what is waiting, then stop; can be repeated."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._waiting.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _serve(self) -> None:
        while (batch := self._collect()) is not None:
            if batch:
                self._answer(batch)

    def _collect(self) -> list[Request] | None:
        """The next requests to score together; None once the scorer is closed."""
        request = self._waiting.get()
        if request is None:
            return None
        batch: list[Request] = []
        size = 0
        closes_at = time.monotonic() + self._max_wait
        while request is not None:
            if request.future.set_running_or_notify_cancel():  # a caller may have given up
                batch.append(request)
                size += len(request.conversations)
            if size >= self._max_batch_size:
                return batch
            try:
                request = self._waiting.get(timeout=max(0.0, closes_at - time.monotonic()))
            except queue.Empty:
                return batch
        self._waiting.put(None)  # this batch first, then the end
        return batch

    def _answer(self, batch: list[Request]) -> None:
        try:
            scores = self._score(batch)
        except Exception as error:  # raised again in the call that it belongs to
            if len(batch) > 1:
                for request in batch:
                    self._answer([request])
            else:
                batch[0].future.set_exception(error)
            return
        stop = 0
        for request in batch:
            start, stop = stop, stop + len(request.conversations)
            rows = scores[start:stop]
            if rows.failed_rows:
                request.future.set_exception(ScoringError(rows))
            else:
                request.future.set_result(rows)

    def _score(self, batch: list[Request]) -> Scores:
        conversations = [conversation for request in batch for conversation in request.conversations]
        self.num_batches += 1
        self.num_conversations += len(conversations)
        if all(request.prompts is None for request in batch):
            return try_score(self.scorer, conversations)
        prompts: list[Prompt | None] = []
        for request in batch:
            prompts += request.prompts if request.prompts is not None else [None] * len(request.conversations)
        return try_score(self.scorer, conversations, prompts)


_batching: dict[int, tuple[Any, MicroBatchingScorer]] = {}
_batching_lock = threading.Lock()


def shared_batching_scorer(reward_model: Any, options: Mapping[str, Any]) -> MicroBatchingScorer:
    """One `MicroBatchingScorer` a process for the same settings, or for the same object.

    For libraries that make many small objects of one configuration. It stays until the process ends.
    """
    if isinstance(reward_model, MicroBatchingScorer):
        return reward_model
    with _batching_lock:
        shared = reward_model
        if reward_model is None or isinstance(reward_model, str | os.PathLike | Mapping):
            shared = acquire_scorer(_plain(reward_model), _plain(options))
        # What is shared is kept beside its batching scorer, so that its id is not given to another object.
        if id(shared) not in _batching:
            scorer = shared if shared is not reward_model else acquire_scorer(reward_model, options)
            _batching[id(shared)] = (shared, MicroBatchingScorer(scorer))
        return _batching[id(shared)][1]


def _plain(value: Any) -> Any:
    """Dicts and lists of a configuration library as Python's own, paths as texts."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
