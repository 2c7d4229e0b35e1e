"""What all routes share: the scorer behind a queue, the limits, the state, and the check of known conversations."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

from starlette.requests import Request

from gym_rm.engine.text.token_bound import TokenBound
from gym_rm.errors import GymRMError, brief, logger
from gym_rm.scorer import Scorer
from gym_rm.scorers.batching import MicroBatchingScorer
from gym_rm.scores import Scores, ScoringError
from gym_rm.server.door import AllTurns, Door, Item, Rendered
from gym_rm.server.errors import Refused
from gym_rm.server.metrics import Metrics
from gym_rm.server.options import ServerOptions
from gym_rm.types import Message, Prompts

State: TypeAlias = Literal["ready", "updating", "draining"]

# Conversations of /info with known scores, so that a client can see whether its scores are those of this model.
CALIBRATION: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "Which number is larger, 12 or 30?"), ("assistant", "30 is larger.")),
    (("user", "Which number is larger, 12 or 30?"), ("assistant", "12 is larger.")),
    (("user", "How do I boil an egg?"), ("assistant", "Put it into boiling water for about eight minutes.")),
    (("user", "Hello!"), ("assistant", "Hello, how can I help?"), ("user", "Add 2 and 2."), ("assistant", "It is 4.")),
)


class Service:
    """A scorer that requests of all protocols share.

    Args:
        scorer: the scorer; requests are merged into its calls.
        options: options of the server.
    """

    def __init__(self, scorer: Scorer, options: ServerOptions) -> None:
        self.scorer = scorer
        self.options = options
        self.limits = options.limits
        self.metrics = Metrics()
        self.door = Door(scorer, self._observe)
        self.batching = MicroBatchingScorer(self.door, max_batch_size=options.max_batch_size, max_wait=options.max_wait)
        self.state: State = "ready"
        self.in_flight = 0
        self.memory = 0
        self.only_loopback = False  # set by a server that only this machine can reach, and that has no key
        self._waiting: set[asyncio.Future[Scores]] = set()
        self._queued = 0
        self._recent = (0.0, 0.0)  # conversations and seconds of the scorer's calls; older calls count less
        self._updates = threading.Lock()
        tokenizer: Any = getattr(getattr(scorer, "renderer", None), "tokenizer", None)
        self._tokenizer = tokenizer
        self._token_bound: Callable[[str], int] = (lambda text: 0) if tokenizer is None else TokenBound(tokenizer)
        self.calibration = self._calibrate()

    @property
    def model(self) -> str:
        """Name of the model or function."""
        return self.model_of(None)

    def model_of(self, scores: Scores | None) -> str:
        """Return the name of the model that made the scores, which can be older than the present one."""
        made = None if scores is None else scores.provenance
        made = made or getattr(self.scorer, "provenance", None)
        return type(self.scorer).__name__ if made is None else str(made.model)

    async def score(self, items: Sequence[Item], request: Request, prompts: Prompts = None) -> Scores:
        """Score the items of a request together with those of other requests; failures are in `Scores.errors`.

        Raises:
            Refused: the request is over a limit, or has no scores in time.
        """
        if not items:
            return Scores.from_rewards([], provenance=getattr(self.scorer, "provenance", None))
        if len(items) > self.limits.most_conversations:
            raise Refused(
                "too_many_conversations",
                f"the request has {len(items)} conversations, more than "
                f"{'max_conversations' if self.limits.max_conversations <= self.limits.max_queue else 'max_queue'}="
                f"{self.limits.most_conversations}; send several requests.",
            )
        timeout = self.timeout(request)
        await self._check_tokens(items)
        if self._queued + len(items) > self.limits.max_queue:
            raise Refused(
                "queue_full",
                f"{self._queued} conversations are waiting, and max_queue is {self.limits.max_queue}; try again later.",
                retry_after=self._retry_after(),
            )
        with self._queue(len(items)):
            return await self._wait(self.batching.submit(items, prompts), request, timeout)

    def timeout(self, request: Request) -> float:
        """Return the seconds that a request may take: `request_timeout`, or less if the request asks for it."""
        text = request.headers.get("x-request-timeout")
        if text is None:
            return self.limits.request_timeout
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds > 0):
            raise Refused("invalid_request", "the header X-Request-Timeout must be a positive number of seconds.")
        return min(seconds, self.limits.request_timeout)

    def draining(self) -> Refused:
        """Return the refusal of a server that is about to stop."""
        return Refused("draining", "the server is shutting down; send the request to another one.", retry_after=5)

    def give_up(self) -> None:
        """Refuse the accepted requests that are not answered yet."""
        for waiting in list(self._waiting):
            waiting.cancel()

    def update_weights(self, path: str) -> float:
        """Load other weights between two batches and return the seconds; waiting requests get the new scores.

        Raises:
            Refused: another update runs, or the scorer has no weights to update.
            ConfigError: the weights do not fit; the old ones are kept.
        """
        if not callable(getattr(self.scorer, "update_weights", None)):
            raise Refused("not_supported", f"the scorer {type(self.scorer).__name__} has no weights to update.")
        if not self._updates.acquire(blocking=False):
            raise Refused("queue_full", "another update of the weights is running; try again later.", retry_after=5)
        start = time.perf_counter()
        before, self.state = self.state, "updating" if self.state == "ready" else self.state
        try:
            self.door.update_weights(path)
            self.calibration = self._calibrate()
            self.metrics.weight_updates.inc()
        finally:
            if self.state == "updating":
                self.state = before
            self._updates.release()
        return time.perf_counter() - start

    def close(self, timeout: float | None = None) -> bool:
        """Score the waiting requests, then stop; return whether that took less than `timeout` seconds.

        The scorer stays open.
        """
        closing = threading.Thread(target=self.batching.close, name="gym_rm closing", daemon=True)
        closing.start()
        closing.join(timeout)
        return not closing.is_alive()

    @contextlib.contextmanager
    def _queue(self, size: int) -> Iterator[None]:
        self._queued += size
        self.metrics.queue.set(self._queued)
        try:
            yield
        finally:
            self._queued -= size
            self.metrics.queue.set(self._queued)

    async def _wait(self, future: concurrent.futures.Future[Scores], request: Request, timeout: float) -> Scores:
        """Return the scores of a waiting request; a client that has gone or waited too long leaves the queue."""
        waiting = asyncio.wrap_future(future)
        self._waiting.add(waiting)
        gone = asyncio.ensure_future(request.receive())  # after the body, the only other message is a disconnect
        try:
            done, _ = await asyncio.wait((waiting, gone), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if waiting.cancelled():  # by give_up
                raise self.draining()
            if waiting in done:
                return waiting.result()
            if done:
                raise Refused("bad_request", "the client closed the connection.")
            raise Refused(
                "deadline",
                f"not scored within {timeout:g} seconds.",
                retry_after=self._retry_after(),
            )
        except ScoringError as error:
            return error.scores
        except GymRMError as error:
            raise Refused("invalid_request", str(error)) from error
        except (Refused, asyncio.CancelledError):
            raise
        except Exception as error:
            # The message of the exception can have text of the conversation: the caller gets it, the log does not.
            logger.error("a scorer raised %s\n%s", *type_and_place(error))
            raise Refused("scorer_error", brief(error)) from error
        finally:
            self._waiting.discard(waiting)
            waiting.cancel()
            gone.cancel()

    async def _check_tokens(self, items: Sequence[Item]) -> None:
        """Refuse a request whose texts certainly have more tokens than the limits."""
        if self._tokenizer is None:
            return
        each = self.limits.max_conversation_tokens or self.limits.max_request_tokens
        texts = [texts_of(item) for item in items]
        sizes = [sum(map(_size, parts)) for parts in texts]
        if sum(sizes) <= self.limits.max_request_tokens and max(sizes) <= each:
            return  # a token has at least one byte
        counts = await asyncio.to_thread(lambda: [self._count(parts) for parts in texts])
        for row, count in enumerate(counts):
            if self.limits.max_conversation_tokens is not None and count > self.limits.max_conversation_tokens:
                raise Refused(
                    "too_many_tokens",
                    f"conversation {row} has at least {count} tokens, more than max_conversation_tokens="
                    f"{self.limits.max_conversation_tokens}; shorten it.",
                )
        if sum(counts) > self.limits.max_request_tokens:
            raise Refused(
                "too_many_tokens",
                f"the request has at least {sum(counts)} tokens, more than max_request_tokens="
                f"{self.limits.max_request_tokens}; send several requests.",
            )

    def _count(self, parts: Sequence[str | list[Any]]) -> int:
        """Return a lower bound of the number of tokens, exact for texts that are not much too long."""
        count = sum(len(part) for part in parts if isinstance(part, list))
        text = "\n".join(part for part in parts if isinstance(part, str))
        with contextlib.suppress(UnicodeEncodeError):  # a lone surrogate: the scorer says so
            bound: int = self._token_bound(text)
            if bound > self.limits.max_request_tokens:
                return count + bound
            return count + len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        return count

    def _observe(self, scores: Scores, seconds: float) -> None:
        metrics, work = self.metrics, scores.workload
        metrics.batch_size.observe(len(scores))
        metrics.conversations.inc(len(scores))
        metrics.failed_rows.inc(len(scores.failed_rows))
        metrics.tokens.inc(int(scores.num_tokens.sum()) if work is None else work.num_tokens)
        if work is not None:
            metrics.unique_tokens.inc(work.unique_tokens)
        scored, spent = self._recent
        self._recent = (0.8 * scored + len(scores), 0.8 * spent + seconds)

    def _retry_after(self) -> int:
        """Return the seconds in which half of the queue will be scored at the present rate, from 1 to 60."""
        scored, spent = self._recent
        return max(1, min(60, math.ceil(self._queued / 2 * spent / scored))) if scored else 1

    def _calibrate(self) -> dict[str, Any]:
        """Score the known conversations; a scorer that cannot (a verifier needs prompts) has null rewards."""
        conversations = [[Message(role=role, content=text) for role, text in each] for each in CALIBRATION]
        rewards: list[float | None] = [None] * len(conversations)
        with contextlib.suppress(Exception):
            rewards = self.door.calibrate(conversations).rewards_or_none()
        return {"conversations": conversations, "rewards": rewards}


def type_and_place(error: BaseException) -> tuple[str, str]:
    """Return the type and the stack of an exception, without its message."""
    return type(error).__name__, "".join(traceback.format_tb(error.__traceback__))


def texts_of(item: Item) -> list[str | list[Any]]:
    """Return the texts of an item, or its token ids, without a copy."""
    if isinstance(item, AllTurns):
        return texts_of(item.conversation)
    if isinstance(item, Rendered):
        return [item.content]
    found: list[str | list[Any]] = []
    waiting: list[Any] = [item]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, list):
            waiting.extend(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
    return found


def _size(part: str | list[Any]) -> int:
    return len(part) if isinstance(part, list) or part.isascii() else 4 * len(part)
