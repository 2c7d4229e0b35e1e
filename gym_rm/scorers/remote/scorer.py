"""A scorer whose model runs in a server: `gym-rm serve`, vLLM or SGLang."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from gym_rm.checks import one_of
from gym_rm.config import divide_settings
from gym_rm.engine.text.judged import JudgedOptions
from gym_rm.engine.text.renderer import Turns
from gym_rm.errors import ConfigError, ConversationError, RemoteError, RowError, logger, warn_once
from gym_rm.http_client.addresses import parse_urls, read_key
from gym_rm.http_client.client import Endpoint, HTTPClient
from gym_rm.http_client.responses import FailedAttempt, InvalidReply, NoSuchRoute, Refused, parse_body
from gym_rm.scorer import CALLS_THAT_WAIT, NeverCopied
from gym_rm.scorers.remote.options import RemoteOptions
from gym_rm.scorers.remote.protocols import (
    ClassifyProtocol,
    GymRMProtocol,
    Row,
    Served,
    classify_protocol,
    failed_row,
    pack,
    read_info,
    read_models,
)
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Message, Prompts, Provenance

ScoredRows: TypeAlias = tuple[list[int], Scores]
SUM: tuple[Message, ...] = ({"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."})
UNKNOWN_REWARDS: tuple[Conversation, ...] = (SUM, (*SUM, SUM[0], {"role": "assistant", "content": "Five, I think."}))
"""Conversations that are scored at the start if no rewards are known."""

TOLERANCE = 0.01
"""Largest difference from the rewards that a server says it gives, relative to the largest of them."""
BODY_BYTES = 256  # of a request body without its rows
QUESTIONS = (("/info", read_info), ("/v1/models", read_models))


class RemoteScorer(NeverCopied):
    """Scores conversations with one or several servers; `gym_rm.load_scorer("http://...")` returns it.

    Requests are divided by the server's limits, sent to the least loaded server, and sent again after a failure. At
    the start, the conversations whose rewards the server tells are scored and compared.

    Args:
        path: URL of a server; several in a list, or with commas between them. They must serve the same model.
        **options: the fields of `RemoteOptions` and `JudgedOptions`. Thinking is removed here, not by the server.

    Raises:
        ConfigError: an option is invalid, the key is refused, httpx is missing, or the server gives no rewards, or for
            other texts, or others than it tells.
        RemoteError: no server answers.

    Example:
        >>> scorer = RemoteScorer("http://127.0.0.1:8000", key="env:REWARD_KEY")  # doctest: +SKIP
        >>> scorer.score(conversations).rewards  # doctest: +SKIP
    """

    max_concurrent_calls = CALLS_THAT_WAIT

    def __init__(self, path: str | Sequence[str], **options: Any) -> None:
        chosen, judged = divide_settings(options, RemoteOptions, JudgedOptions, owner="a scorer at a URL")
        self.urls, key = parse_urls(path), read_key(chosen.key)
        self._judged: JudgedOptions = judged
        self.options: RemoteOptions = chosen.model_copy(update={"key": None})
        self._served: Served | None = None
        self._protocol: GymRMProtocol | ClassifyProtocol = GymRMProtocol()
        self._closed = False
        self._client = HTTPClient(
            self.urls,
            key=key,
            attempt_timeout=chosen.attempt_timeout or chosen.timeout / (1 if len(self.urls) == 1 else 4),
            max_retries=chosen.max_retries,
            max_connections=chosen.max_connections,
            recheck=self._recheck,
        )
        try:
            self._client.run(self._start())
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"RemoteScorer({', '.join(self.urls)}, {self.provenance.model!r})"

    @property
    def relative(self) -> bool:
        """Whether a reward depends on the other rows of a call; see `gym_rm.scorer.is_relative`."""
        return bool(self._known().provenance.settings.get("relative"))

    @property
    def provenance(self) -> Provenance:
        """The server's provenance, with its URL."""
        return self._with_url(self._known().provenance)

    def _with_url(self, made: Provenance) -> Provenance:
        served, renderer = self._known(), self._protocol.renderer
        url = self.urls[0] if len(self.urls) == 1 else list(self.urls)
        settings = {**made.settings, "url": url, "protocol": served.protocol, "server_scorer": made.scorer}
        if served.protocol != "gym_rm":
            settings["rendered_by"] = "server" if renderer is None else "client"
        if renderer is not None:
            settings |= renderer.settings | ({"date": str(renderer.date)} if renderer.date else {})
            made = dataclasses.replace(made, template_hash=renderer.template_hash)
        return dataclasses.replace(made, scorer="RemoteScorer", settings=settings | self._judged.settings)

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None, *, turns: Turns = "last") -> Scores:
        """Score N conversations.

        Args:
            conversations: N lists of messages.
            prompts: sent to `gym-rm serve`, for verifiers; for vLLM and SGLang, `tools` are written into the text.
            turns: `"all"` also asks for the rewards after every assistant turn.

        Raises:
            ScoringError: some rows have no score; the error's `scores` has the scores of the other rows.
            RemoteError: the servers did not answer in time.
        """
        one_of("turns", turns, ("last", "all"))
        if self._closed:
            raise RuntimeError("this RemoteScorer is closed; make a new one.")
        conversations, prompts, complete = self._judged.read(conversations, prompts)
        rows: list[Row | ConversationError] = []
        for row, conversation in enumerate(conversations):
            try:
                rows.append(self._protocol.encode(conversation, None if prompts is None else prompts[row], turns))
            except ConversationError as error:
                rows.append(error)
        scores = complete(self._client.run(self._score(rows, turns)))
        made = scores.provenance or self._known().provenance  # not that of a call beside it, of newer weights
        return dataclasses.replace(scores, provenance=self._with_url(made)).raise_for_errors()

    def sleep(self) -> None:
        """Do nothing: the server manages its own device."""

    def wake(self) -> None:
        """Do nothing; see `sleep`."""

    def close(self) -> None:
        """Close all connections; closing twice is allowed."""
        self._closed = True
        self._client.close()

    def _known(self) -> Served:
        assert self._served is not None, "no server has answered"
        return self._served

    async def _start(self) -> None:
        """Ask every server what it serves, and compare rewards. One that does not answer gets no requests for now.

        Raises:
            ConfigError: the servers serve different models, or give other rewards than known.
            RemoteError: none of them answers.
        """
        endpoints, error = [], None
        answers = await asyncio.gather(*map(self._identify, self._client.endpoints), return_exceptions=True)
        for endpoint, served in zip(self._client.endpoints, answers, strict=True):
            if isinstance(served, RemoteError):
                error = served
                logger.warning("%s gets no requests for now: %s", endpoint.url, served)
            elif isinstance(served, BaseException):
                raise served
            else:
                self._accept(endpoint, served)
                endpoints.append(endpoint)
        if error is not None and not endpoints:
            raise error
        if self._known().protocol != "gym_rm":  # in a thread, because opening a tokenizer takes seconds
            self._protocol = await asyncio.to_thread(classify_protocol, self._known(), self.options.tokenizer)
            self._served = self._protocol.served
        await self._client.all_of([self._calibrate(endpoint) for endpoint in endpoints])

    async def _recheck(self, endpoint: Endpoint) -> None:
        """Raise FailedAttempt or ConfigError if a server that failed must not get requests again yet."""
        try:
            self._accept(endpoint, await self._identify(endpoint, max_retries=0))
            await self._calibrate(endpoint, max_retries=0)
        except RemoteError as error:
            raise FailedAttempt(str(error)) from error

    def _accept(self, endpoint: Endpoint, served: Served) -> None:
        """Raise ConfigError if this server serves something else than the others."""
        if self._served is None:
            self._served = served
        elif served.identity != self._served.identity:
            raise ConfigError(
                f"all servers must serve the same model, but {endpoint.url} serves {served.identity} and the others "
                f"{self._served.identity}."
            )

    async def _identify(self, endpoint: Endpoint, max_retries: int | None = None) -> Served:
        """Ask a server for its protocol and model."""
        reasons = []
        for path, read in QUESTIONS:
            deadline = asyncio.get_running_loop().time() + self.options.startup_timeout
            sent = self._client.send(path, read=bytes, deadline=deadline, only=endpoint, max_retries=max_retries)
            try:
                return read(parse_body((await sent)[0]))
            except (NoSuchRoute, Refused, InvalidReply) as error:
                reasons.append(f"GET {path}: {error}")
        raise ConfigError(f"{endpoint.url} is no gym-rm serve, vLLM or SGLang ({'; '.join(reasons)}); check the URL.")

    async def _calibrate(self, endpoint: Endpoint, max_retries: int | None = None) -> None:
        """Compare the rewards of a server with those that it tells, and its text with ours. Raises ConfigError."""
        served, protocol = self._known(), self._protocol
        conversations = [conversation for conversation, _ in served.calibration] or list(UNKNOWN_REWARDS)
        try:
            rows = [protocol.encode(conversation, None, "last") for conversation in conversations]
        except ConversationError as error:
            raise ConfigError(f"a conversation of the calibration cannot be sent: {error}") from error
        send = functools.partial(self._client.send, only=endpoint, max_retries=max_retries)
        scores = _in_order(await self._send(list(enumerate(rows)), "last", self._deadline(), send))
        for row in scores.failed_rows:
            raise ConfigError(f"{endpoint.url} cannot score a conversation of the calibration: {scores.errors[row]}.")
        check_rewards(endpoint.url, scores.rewards.tolist(), served.calibration)
        if isinstance(protocol, ClassifyProtocol) and protocol.renderer is not None and not protocol.renderer.date:
            question, ours = protocol.question(conversations[-1]), parse_body(rows[-1][-1])
            with contextlib.suppress(NoSuchRoute, Refused):  # no such route, or it reads no messages
                told, _ = await send("/tokenize", question, read=parse_body, deadline=self._deadline())
                # It does not write what the tokenizer adds to the template: a BOS, or [CLS] and [SEP].
                if not isinstance(told, dict) or told.get("tokens") not in (ours, ours[1:], ours[1:-1]):
                    raise ConfigError(
                        f"{endpoint.url} writes other token ids than {protocol.renderer.tokenizer.name_or_path!r}: its "
                        "chat template differs. Pass tokenizer=, a folder with it, or 'server' to send messages."
                    )

    async def _score(self, rows: Sequence[Row | ConversationError], turns: Turns) -> Scores:
        """Return the scores of these rows, in order.

        All rows of a call get the rewards of one model: if a server changes it during the call, they are scored again.
        """
        limit = self._known().max_request_bytes - BODY_BYTES
        failed: list[ScoredRows] = []
        wanted: list[tuple[int, Row]] = []
        for row, encoded in enumerate(rows):
            if isinstance(encoded, ConversationError):
                failed.append(([row], failed_row(RowError.of(encoded))))
            elif (size := sum(map(len, encoded))) > limit:
                failed.append(([row], failed_row(f"the conversation has {size} bytes, the server accepts {limit}")))
            else:
                wanted.append((row, encoded))
        deadline = self._deadline()
        for _ in range(3):
            parts = await self._send(wanted, turns, deadline, self._client.send)
            seen = [scores.provenance for _, scores in parts if scores.provenance is not None]
            made = {(each.model, each.revision, each.template_hash) for each in seen}
            if seen:
                self._note(seen[-1])
            if len(made) <= 1:
                return dataclasses.replace(_in_order([*failed, *parts]), provenance=seen[-1] if seen else None)
        raise RemoteError(
            f"{', '.join(self.urls)} gave scores of different models in one call: {sorted(map(str, made))}; wait "
            "until all servers have the same one."
        )

    async def _send(
        self, rows: Sequence[tuple[int, Row]], turns: Turns, deadline: float, send: Callable[..., Any]
    ) -> list[ScoredRows]:
        """Return the scores of encoded rows, in requests within the limits of the server, or in one to keep groups."""
        served, protocol = self._known(), self._protocol
        share = max(1, math.ceil(len(rows) / len(self.urls)))
        limits = (self.options.max_conversations, share, served.max_conversations)
        sizes = [sum(map(len, row)) + len(row) for _, row in rows]  # with the commas
        max_rows = min(limit for limit in limits if limit is not None)
        chunks = list(pack(sizes, max_bytes=served.max_request_bytes - BODY_BYTES, max_rows=max_rows))
        if self.relative and chunks:
            chunks = [list(range(len(rows)))]

        async def request(chunk: list[tuple[int, Row]]) -> list[ScoredRows]:
            numbers, encoded = [number for number, _ in chunk], [row for _, row in chunk]
            try:
                scores, _ = await send(
                    protocol.path,
                    protocol.body(encoded, turns),
                    read=lambda body: protocol.read(parse_body(body), encoded, turns),
                    deadline=deadline,
                )
            except NoSuchRoute as error:
                asked = (each for each in self._client.endpoints if str(error).startswith(each.url + protocol.path))
                endpoint = next(asked)
                now = (await self._identify(endpoint, max_retries=0)).provenance.model
                raise ConfigError(
                    f"{endpoint.url} gives no rewards of {served.provenance.model!r}: it serves {now!r}. If this is a "
                    "chat model, start a reward model (vLLM: --runner pooling, SGLang: --is-embedding), or pass "
                    "kind='judge'; if the model has changed, make a new scorer."
                ) from error
            except Refused as refused:  # the halves are sent, to find the invalid row
                if len(chunk) == 1 or self.relative:
                    reason = f"the server refused the conversation: {refused.reason}"
                    return [([number], failed_row(RowError(reason, "refused"))) for number in numbers]
                middle = len(chunk) // 2
                first, second = await self._client.all_of([request(chunk[:middle]), request(chunk[middle:])])
                return first + second
            return [(numbers, scores)]

        sent = await self._client.all_of([request([rows[k] for k in chunk]) for chunk in chunks])
        return [part for parts in sent for part in parts]

    def _note(self, made: Provenance) -> None:
        """Remember what the server serves now, and tell if it has changed."""
        before = self._known()
        self._served = dataclasses.replace(before, provenance=made)
        if self._served.identity != before.identity:
            warn_once(f"{', '.join(self.urls)} now serve {self._served.identity}, before {before.identity}")

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.options.timeout


def check_rewards(url: str, rewards: Sequence[float], known: Sequence[tuple[Conversation, float]]) -> None:
    """Compare rewards with those of `/info`; without any, look whether they are the output of an activation.

    Raises:
        ConfigError: they differ, or all are 1; the message has likely causes.
    """
    if not known:
        if all(reward == 1.0 for reward in rewards):
            raise ConfigError(f"{url} gives every conversation the reward 1: it applies a softmax to one value.")
        if all(0 < reward < 1 for reward in rewards):
            shown = ", ".join(f"{reward:.4g}" for reward in rewards)
            logger.warning("%s gives rewards between 0 and 1 (%s): it may apply a sigmoid.", url, shown)
        return
    allowed = TOLERANCE * max(abs(reward) for _, reward in known) + 1e-6
    for reward, (conversation, expected) in zip(rewards, known, strict=True):
        if abs(reward - expected) > allowed:
            raise ConfigError(
                f"{url} gives other rewards than its /info says: {reward:.6g} instead of {expected:.6g} for the "
                f"conversation that ends with {str(conversation[-1]['content'])[-60:]!r}. It may apply an activation, "
                "or something between changes conversations or rewards, or another server is at this URL."
            )


def _in_order(parts: Sequence[ScoredRows]) -> Scores:
    order = [row for rows, _ in parts for row in rows]
    return Scores.concatenate(scores for _, scores in parts).take(np.argsort(order, kind="stable"))
