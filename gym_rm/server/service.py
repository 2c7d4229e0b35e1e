"""What all routes share: the scorer behind a queue, the limits, the state, and the check of known conversations."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from starlette.requests import Request

from gym_rm.errors import GymRMError, brief, logger
from gym_rm.scorer import Scorer, try_score
from gym_rm.scorers.batching import MicroBatchingScorer
from gym_rm.scores import Scores, ScoringError
from gym_rm.server.metrics import Metrics
from gym_rm.server.mixed_scorer import MixedScorer, ScorerInput, Sort
from gym_rm.server.options import ServerOptions
from gym_rm.server.responses import RequestError
from gym_rm.types import Message, Prompts, Workload

State: TypeAlias = Literal["ready", "updating", "draining"]

# Conversations of /info with known scores, so that a client can see whether its scores are those of this model.
CALIBRATION: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "Which number is larger, 12 or 30?"), ("assistant", "30 is larger.")),
    (("user", "Which number is larger, 12 or 30?"), ("assistant", "12 is larger.")),
    (("user", "How do I boil an egg?"), ("assistant", "Put it into boiling water for about eight minutes.")),
    (("user", "Hello!"), ("assistant", "Hello, how can I help?"), ("user", "Add 2 and 2."), ("assistant", "It is 4.")),
)


class Service:
    """A scorer that requests of all protocols share: they are merged into its calls."""

    def __init__(self, scorer: Scorer, options: ServerOptions) -> None:
        self.scorer = scorer
        self.options = options
        self.limits = options.limits
        self.metrics = Metrics()
        self.mixed = MixedScorer(scorer, self._observe)
        size, wait = options.max_batch_size, options.max_wait
        self.batching = MicroBatchingScorer(self.mixed, max_batch_size=size, max_wait=wait)
        self.state: State = "ready"
        self.in_flight = 0
        self.memory = 0
        self.only_loopback = False  # set by a server that only this machine can reach, and that has no key
        self._waiting: set[asyncio.Future[Scores]] = set()
        self._queued = 0
        self.metrics.queue.set_function(lambda: self._queued)
        self._updates = threading.Lock()
        self.description = self._describe()

    @property
    def model(self) -> str:
        """Name of the model or function."""
        return self.model_of(None)

    def model_of(self, scores: Scores | None) -> str:
        """Return the name of the model that made the scores, which can be older than the present one."""
        made = None if scores is None else scores.provenance
        made = made or getattr(self.scorer, "provenance", None)
        return type(self.scorer).__name__ if made is None else str(made.model)

    async def score(
        self, inputs: Sequence[Any], request: Request, prompts: Prompts = None, *, sort: Sort = "reply"
    ) -> Scores:
        """Score the inputs of a request together with those of other requests; failures are in `Scores.errors`.

        Raises:
            RequestError: the request is over a limit, or has no scores in time.
        """
        if not inputs:
            return Scores.from_rewards([], provenance=getattr(self.scorer, "provenance", None))
        self.check_size(len(inputs))
        if self._queued + len(inputs) > self.limits.max_queue:
            raise RequestError(
                "queue_full",
                f"{self._queued} conversations are waiting, and max_queue is {self.limits.max_queue}; try again later.",
                retry_after=1,
            )
        self._queued += len(inputs)
        marked: list[ScorerInput] = [(sort, each) for each in inputs]
        try:
            return await self._wait(self.batching.submit(marked, prompts), request)
        finally:
            self._queued -= len(inputs)

    def check_size(self, size: int) -> None:
        """Raise RequestError if a request has more conversations than it may have."""
        if size > self.limits.most_conversations:
            raise RequestError(
                "too_many_conversations",
                f"the request has {size} conversations, more than "
                f"{'max_conversations' if self.limits.max_conversations <= self.limits.max_queue else 'max_queue'}="
                f"{self.limits.most_conversations}; send several requests.",
            )

    async def score_texts(self, texts: Sequence[Any], request: Request, *, add_special_tokens: bool = True) -> Scores:
        """Score rendered texts, pairs of texts, or token ids, which get no special tokens.

        Raises:
            RequestError: the scorer cannot score texts, or the field is empty; and as `score`.
        """
        if not self.mixed.scores_texts:
            raise RequestError(
                "not_supported",
                f"the scorer of {self.model!r} scores conversations, and cannot read a text that is already rendered; "
                "send messages, a pair of texts, or POST /v1/rewards.",
            )
        single = isinstance(texts, str) or (len(texts) > 0 and isinstance(texts[0], int))
        values: list[Any] = [texts] if single else list(texts)
        if not values or not all(values):
            raise RequestError("invalid_request", "the input is empty; expected at least one text or token.", "input")
        special = add_special_tokens and isinstance(values[0], str)
        return await self.score(values, request, sort="text with special tokens" if special else "text")

    def draining(self) -> RequestError:
        """Return the refusal of a server that is about to stop."""
        return RequestError("draining", "the server is shutting down; send the request to another one.", retry_after=5)

    def give_up(self) -> None:
        """Refuse the accepted requests that are not answered yet."""
        for waiting in list(self._waiting):
            waiting.cancel()

    def update_weights(self, path: str) -> dict[str, Any]:
        """Load other weights between two batches and return what they are; waiting requests get the new scores.

        Raises:
            RequestError: another update runs, or the scorer has no weights to update.
            ConfigError: the weights do not fit; the old ones are kept.
        """
        if not callable(getattr(self.scorer, "update_weights", None)):
            raise RequestError("not_supported", f"the scorer {type(self.scorer).__name__} has no weights to update.")
        if not self._updates.acquire(blocking=False):
            raise RequestError(
                "queue_full", "another update of the weights is running; try again later.", retry_after=5
            )
        start = time.perf_counter()
        before, self.state = self.state, "updating" if self.state == "ready" else self.state
        try:
            with self.mixed.lock:
                self.scorer.update_weights(path)  # type: ignore[attr-defined]
                self.description = made = self._describe()
            self.metrics.weight_updates.inc()
        finally:
            if self.state == "updating":
                self.state = before
            self._updates.release()
        return {"model": made["model"], "provenance": made["provenance"], "seconds": time.perf_counter() - start}

    def close(self, timeout: float | None = None) -> bool:
        """Score the waiting requests, then stop; return whether that took less than `timeout` seconds.

        The scorer stays open.
        """
        closing = threading.Thread(target=self.batching.close, name="gym_rm closing", daemon=True)
        closing.start()
        closing.join(timeout)
        return not closing.is_alive()

    async def _wait(self, future: concurrent.futures.Future[Scores], request: Request) -> Scores:
        """Return the scores of a waiting request; a client that has gone or waited too long leaves the queue."""
        waiting, timeout = asyncio.wrap_future(future), self.limits.request_timeout
        self._waiting.add(waiting)
        gone = asyncio.ensure_future(request.receive())  # after the body, the only other message is a disconnect
        try:
            done, _ = await asyncio.wait((waiting, gone), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if waiting.cancelled():  # by give_up
                raise self.draining()
            if waiting in done:
                return waiting.result()
            if done:
                raise RequestError("bad_request", "the client closed the connection.")
            raise RequestError("deadline", f"not scored within {timeout:g} seconds.", retry_after=1)
        except ScoringError as error:
            return error.scores
        except GymRMError as error:
            raise RequestError("invalid_request", str(error)) from error
        except (RequestError, asyncio.CancelledError):
            raise
        except Exception as error:
            # The message of the exception can have text of the conversation: the caller gets it, the log does not.
            logger.error("a scorer raised %s\n%s", *type_and_place(error))
            raise RequestError("scorer_error", brief(error)) from error
        finally:
            self._waiting.discard(waiting)
            future.cancel()  # here and now: that of `waiting` would reach the queue after the answer is sent
            waiting.cancel()
            gone.cancel()

    def _observe(self, scores: Scores) -> None:
        metrics, work = self.metrics, scores.workload or Workload(num_tokens=int(scores.num_tokens.sum()))
        metrics.batch_size.observe(len(scores))
        metrics.conversations.inc(len(scores))
        metrics.failed_rows.inc(len(scores.failed_rows))
        for name, counter in metrics.work.items():
            counter.inc(getattr(work, name))

    def _describe(self) -> dict[str, Any]:
        """Return the model and its rewards of the known conversations; null if it needs prompts, as verifiers do."""
        conversations = [[Message(role=role, content=text) for role, text in turns] for turns in CALIBRATION]
        rewards: list[float | None] = [None] * len(conversations)
        with self.mixed.lock:
            with contextlib.suppress(Exception):
                rewards = try_score(self.scorer, conversations).rewards_or_none()
            made = getattr(self.scorer, "provenance", None)
            model = self.model
        provenance = None if made is None else dataclasses.asdict(made)
        known = {"conversations": conversations, "rewards": rewards}
        return {"model": model, "provenance": provenance, "calibration": known}


def type_and_place(error: BaseException) -> tuple[str, str]:
    """Return the type and the stack of an exception, without its message."""
    return type(error).__name__, "".join(traceback.format_tb(error.__traceback__))
