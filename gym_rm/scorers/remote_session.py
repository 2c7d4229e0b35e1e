"""What a remote scorer does in its event loop: find out what the servers serve, compare rewards, score in chunks."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

from gym_rm.checks import finite
from gym_rm.errors import ConfigError, ConversationError, RemoteError, logger, warn_once
from gym_rm.scorers.remote_connections import Connections, Endpoint, Limits, Request
from gym_rm.scorers.remote_protocols import (
    GymRMProtocol,
    InvalidReply,
    OpenRLHFProtocol,
    Protocol,
    Row,
    Served,
    Turns,
    VLLMProtocol,
    as_messages,
    pack,
    parse_json,
    read_info,
)
from gym_rm.scorers.remote_replies import Missing, Refused
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Provenance

BUILT_IN: tuple[Conversation, ...] = (
    ({"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "2 + 2 is 4."}),
    ({"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is five, I think."}),
    (
        {"role": "user", "content": "Name a city in France."},
        {"role": "assistant", "content": "Lyon."},
        {"role": "user", "content": "And count to two hundred."},
        {"role": "assistant", "content": " ".join(map(str, range(1, 201)))},
    ),
)
"""Conversations that are compared with a local model if the server names none."""

BODY_BYTES = 256  # of a request body without its rows
Value = TypeVar("Value")
Part: TypeAlias = tuple[list[int], Scores]


@dataclass(frozen=True, slots=True)
class Expected:
    """A conversation, its known reward and who said so."""

    conversation: Conversation
    reward: float
    source: str


class Session:
    """The servers of a remote scorer. All coroutines run in one event loop.

    Args:
        urls, key, limits: see `Connections`.
        options: `RemoteOptions`.
        text_protocol: the protocol that writes texts, if it was chosen.
        served: what the servers serve, if it is known.
        expected: known rewards in addition to those of `/info`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        key: str | None,
        options: Any,
        limits: Limits,
        text_protocol: OpenRLHFProtocol | None,
        served: Served | None,
        expected: tuple[Expected, ...],
    ) -> None:
        self.served = served
        self.expected = expected
        self._urls, self._key, self._options, self._limits = urls, key, options, limits
        self._text_protocol = text_protocol
        self._connections: Connections

    async def open(self) -> None:
        """Create the connections in the loop that uses them."""
        self._connections = Connections(self._urls, key=self._key, limits=self._limits, admit=self._admit)

    async def close(self) -> None:
        """Close the connections."""
        if hasattr(self, "_connections"):
            await self._connections.close()

    def protocol(self, served: Served) -> Protocol:
        """Return the protocol of a server."""
        if served.protocol == "gym_rm":
            return GymRMProtocol()
        if self._text_protocol is not None:
            return self._text_protocol
        options, extra = self._options, {}
        for name in ("chat_template", "chat_template_kwargs"):
            if getattr(options, name) is not None:
                extra[name] = getattr(options, name)
        if options.truncate:
            extra |= {"truncate_prompt_tokens": options.max_length, "truncation_side": "left"}
        cut = options.max_length if options.truncate else None
        return VLLMProtocol(served.name, options.label, extra, cut)

    # --- start -----------------------------------------------------------------------------------------------------

    async def start(self, seconds: float) -> Served:
        """Ask every server what it serves. One that does not answer gets no requests until it does.

        Raises:
            ConfigError: the servers serve different models.
            RemoteError: none of them answers.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        endpoints = self._connections.endpoints
        found = await asyncio.gather(*(self._identify(one, deadline) for one in endpoints), return_exceptions=True)
        errors = [each for each in found if isinstance(each, BaseException)]
        for error in errors:
            if not isinstance(error, RemoteError):
                raise error
        if len(errors) == len(endpoints):
            raise errors[0]
        for endpoint, each in zip(endpoints, found, strict=True):
            if isinstance(each, BaseException):
                logger.warning("%s gets no requests for now: %s", endpoint.url, each)
                self._connections.exclude(endpoint)
            else:
                self._accept(endpoint, each)
        assert self.served is not None
        return self.served

    async def check(self) -> None:
        """Compare the rewards of all healthy servers with the known ones."""
        healthy = [each for each in self._connections.endpoints if each.healthy]
        await _all([self._check(endpoint) for endpoint in healthy])

    async def _admit(self, endpoint: Endpoint) -> None:
        """Raise an error if a server that failed must not come back yet."""
        now = asyncio.get_running_loop().time()
        self._accept(endpoint, await self._identify(endpoint, now + self._options.startup_timeout))
        await self._check(endpoint)

    def _accept(self, endpoint: Endpoint, served: Served) -> None:
        """Raise ConfigError if this server serves something else than the others."""
        if self.served is None:
            self.served = served
        elif served.identity != self.served.identity:
            raise ConfigError(
                f"all servers must serve the same model, but {endpoint.url} serves {served.identity} and the others "
                f"{self.served.identity}."
            )

    async def _identify(self, endpoint: Endpoint, deadline: float) -> Served:
        """Ask a server for its protocol and model."""
        chosen = self._options.protocol
        if chosen == "openrlhf":
            return self._unnamed(chosen)
        ways = {"gym_rm": ("/info", read_info), "vllm": ("/v1/models", _read_models)}
        reasons = []
        for path, read in ways.values() if chosen == "auto" else [ways[chosen]]:
            found = await self._ask(endpoint, path, read, deadline)
            if isinstance(found, Served):
                return found
            reasons.append(f"GET {path}: {found}")
        if chosen == "vllm":  # behind a proxy with only /classify
            return self._unnamed(chosen)
        advice = "pass protocol='gym_rm', 'vllm' or 'openrlhf'" if chosen == "auto" else "check the URL and protocol="
        raise ConfigError(f"{endpoint.url} has an unknown protocol ({'; '.join(reasons)}); {advice}.")

    def _unnamed(self, protocol: str) -> Served:
        """Return what is known of a server that does not name its model."""
        return Served(protocol, Provenance("unknown", ", ".join(self._urls)))

    async def _ask(self, endpoint: Endpoint, path: str, read: Callable[[Any], Served], deadline: float) -> Served | str:
        """Return what `read` makes of the reply to GET, or why there is none."""

        def tolerant(body: bytes) -> Served | str:
            try:
                return read(parse_json(body))
            except InvalidReply as error:
                return str(error)

        try:
            return (await self._connections.send(Request(path), tolerant, deadline, only=endpoint))[0]
        except (Missing, Refused) as error:
            return str(error)

    async def _check(self, endpoint: Endpoint) -> None:
        """Compare the rewards of a server with the known ones.

        Raises:
            ConfigError: a difference is too large.
        """
        assert self.served is not None
        own = tuple(Expected(one, reward, "/info of the server") for one, reward in self.served.calibration)
        known = own + self.expected
        conversations = [each.conversation for each in known] or list(BUILT_IN[:2])
        protocol = self.protocol(self.served)
        try:
            rows = [protocol.encode(one, None) for one in conversations]
        except ConversationError as error:
            raise ConfigError(f"a conversation of the calibration cannot be sent: {error}") from error
        parts = await self._parts(list(enumerate(rows)), "last", self._deadline(), only=endpoint)
        scores = _in_order(parts)
        for row in scores.failed_rows:
            raise ConfigError(f"{endpoint.url} cannot score a conversation of the calibration: {scores.errors[row]}.")
        if known:
            compare(endpoint.url, scores.rewards.tolist(), known, self._options.tolerance)
        else:
            _suspect_activation(endpoint.url, scores.rewards.tolist())

    # --- scores ----------------------------------------------------------------------------------------------------

    async def score(self, rows: Sequence[Row | ConversationError], turns: Turns) -> Scores:
        """Return the scores of these rows, in order.

        All rows of a call get the rewards of one model: if a server changes it during the call, the earlier rows are
        scored again.
        """
        assert self.served is not None
        limit = self.served.max_request_bytes - BODY_BYTES
        parts: list[Part] = []
        wanted: list[tuple[int, Row]] = []
        for row, encoded in enumerate(rows):
            if isinstance(encoded, ConversationError):
                parts.append(([row], _failed(str(encoded))))
            elif (size := sum(map(len, encoded))) > limit:
                parts.append(([row], _failed(f"the conversation has {size} bytes, the server accepts {limit}")))
            else:
                wanted.append((row, encoded))
        deadline = self._deadline()
        for _ in range(3):
            parts += await self._parts(wanted, turns, deadline)
            made = {_model_of(scores): scores.provenance for _, scores in parts if scores.provenance is not None}
            if made:
                self._note(list(made.values())[-1])
            if len(made) <= 1:
                return _in_order(parts)
            latest = list(made)[-1]
            kept = [part for part in parts if part[1].provenance is None or _model_of(part[1]) == latest]
            done = {row for part, _ in kept for row in part}
            parts, wanted = kept, [each for each in wanted if each[0] not in done]
        raise RemoteError(
            f"{', '.join(self._urls)} gave scores of different models in one call: {sorted(map(str, made))}; wait "
            "until all servers have the same one."
        )

    async def _parts(
        self, rows: Sequence[tuple[int, Row]], turns: Turns, deadline: float, *, only: Endpoint | None = None
    ) -> list[Part]:
        """Return the scores of encoded rows, divided by the limits of the server."""
        assert self.served is not None
        protocol = self.protocol(self.served)
        limits = [self._options.max_conversations, self.served.max_conversations, protocol.max_rows]
        healthy = sum(each.healthy for each in self._connections.endpoints)
        limits.append(max(1, math.ceil(len(rows) / max(healthy, 1))))
        sizes = [sum(map(len, row)) + len(row) for _, row in rows]  # with the commas
        chunks = pack(
            sizes,
            max_bytes=self.served.max_request_bytes - BODY_BYTES,
            max_rows=min(limit for limit in limits if limit is not None),
        )
        sent = [self._chunk(protocol, [rows[k] for k in chunk], turns, deadline, only) for chunk in chunks]
        return [part for parts in await _all(sent) for part in parts]

    async def _chunk(
        self, protocol: Protocol, rows: list[tuple[int, Row]], turns: Turns, deadline: float, only: Endpoint | None
    ) -> list[Part]:
        """Return the scores of one request. If the server refuses it, its halves are sent, to find the invalid row."""
        request = Request(protocol.path, protocol.body([row for _, row in rows], turns))
        numbers = [number for number, _ in rows]
        try:
            scores, endpoint = await self._connections.send(
                request,
                lambda body: protocol.read(parse_json(body), [row for _, row in rows], turns),
                deadline,
                only=only,
            )
        except Refused as refused:
            if len(rows) == 1:
                return [(numbers, _failed(f"the server refused the conversation: {refused.reason}"))]
            middle = len(rows) // 2
            halves = (rows[:middle], rows[middle:])
            first, second = await _all([self._chunk(protocol, half, turns, deadline, only) for half in halves])
            return first + second
        if isinstance(protocol, VLLMProtocol) and protocol.cut(scores):
            scores = await self._count(protocol, rows[0][1], scores, deadline, endpoint)
        return [(numbers, scores)]

    async def _count(
        self, protocol: VLLMProtocol, row: Row, scores: Scores, deadline: float, endpoint: Endpoint
    ) -> Scores:
        """Return the scores with the number of tokens that vLLM truncated."""
        request = Request("/tokenize", protocol.token_count(row))
        try:
            counted, _ = await self._connections.send(
                request, lambda body: protocol.with_count(scores, parse_json(body)), deadline, only=endpoint
            )
        except (Refused, RemoteError) as error:
            return _failed(f"the conversation may have been truncated, and its tokens cannot be counted: {error}")
        return counted

    def _note(self, made: Provenance) -> None:
        """Remember what the server serves now, and tell if it has changed."""
        assert self.served is not None
        before, now = self.served, dataclasses.replace(self.served, provenance=made)
        if now.identity != before.identity:
            warn_once(f"{', '.join(self._urls)} now serve {now.identity}, before {before.identity}")
        self.served = now

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + float(self._options.timeout)


def compare(url: str, found: Sequence[float], known: Sequence[Expected], tolerance: float) -> None:
    """Raise ConfigError with both numbers and likely causes if a reward differs from the known one."""
    expected = [each.reward for each in known]
    allowed = tolerance * max(map(abs, expected)) + 1e-6
    if all(abs(one - other) <= allowed for one, other in zip(found, expected, strict=True)):
        return
    row = max(range(len(known)), key=lambda k: abs(found[k] - expected[k]))
    text = str(known[row].conversation[-1]["content"])
    raise ConfigError(
        f"{url} gives other rewards than expected: {found[row]:.6g} instead of {expected[row]:.6g} "
        f"({known[row].source}) for the conversation that ends with {text[-60:]!r}; tolerance={tolerance:g} allows a "
        f"difference of {allowed:.3g}. {_cause(found, expected, allowed)}"
    )


def _cause(found: Sequence[float], expected: Sequence[float], allowed: float) -> str:
    if len(set(found)) == 1 and len(found) > 1 and len(set(expected)) > 1:
        return "All rewards are equal: the server applies a softmax to one value, or ignores the conversation."
    squashed = [1 / (1 + math.exp(-min(max(each, -700.0), 700.0))) for each in expected]
    if all(abs(one - other) <= min(allowed, 0.01) for one, other in zip(found, squashed, strict=True)):
        return "The rewards are the sigmoid of the expected ones: the server applies an activation. Turn it off there."
    if all(0 < each < 1 for each in found) and not all(0 < each < 1 for each in expected):
        return "All rewards are between 0 and 1: the server probably applies an activation. Turn it off there."
    return (
        "Likely causes: another checkpoint or precision, another chat template (or a second BOS token), truncation at "
        "a smaller length, or an activation in the server."
    )


def _suspect_activation(url: str, found: Sequence[float]) -> None:
    """Report rewards that look like the output of an activation, for servers without known rewards."""
    if all(each == 1.0 for each in found):
        raise ConfigError(f"{url} gives every conversation the reward 1: it applies a softmax to one value.")
    if all(0 < each < 1 for each in found):
        logger.warning(
            "%s gives rewards between 0 and 1 (%s): it may apply a sigmoid. Pass local= or calibration= to check.",
            url,
            ", ".join(f"{each:.4g}" for each in found),
        )


def expected_rewards(name: str, listed: Any) -> tuple[Expected, ...]:
    """Return known rewards from `[(conversation, reward), ...]` or `[{"conversation": ..., "reward": ...}, ...]`.

    Raises:
        ConfigError: an entry has another form.
    """
    known = []
    for entry in listed or ():
        if isinstance(entry, Mapping):
            entry = (entry.get("conversation"), entry.get("reward"))
        try:
            conversation, reward = entry
            known.append(Expected(cast(Conversation, as_messages(conversation)), finite("reward", reward), name))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{name.removesuffix('=')} must be a list of (conversation, reward), got {entry!r:.100}: {error}"
            ) from error
    return tuple(known)


def _read_models(reply: Any) -> Served:
    """Return what vLLM's `GET /v1/models` says."""
    models = reply.get("data") if isinstance(reply, Mapping) else None
    first = models[0] if isinstance(models, list) and models else None
    if not isinstance(first, Mapping) or not isinstance(first.get("id"), str):
        raise InvalidReply(f"expected a list of models, got {reply!r:.100}")
    length = first.get("max_model_len")
    settings = {"max_length": length} if type(length) is int else {}
    provenance = Provenance(str(first.get("owned_by") or "vllm"), first["id"], settings=settings)
    return Served("vllm", provenance, name=first["id"])


def _model_of(scores: Scores) -> tuple[Any, ...]:
    made = scores.provenance
    return () if made is None else (made.model, made.revision, made.template_hash)


def _failed(error: str) -> Scores:
    return Scores.from_rewards([np.nan], errors=[error])


def _in_order(parts: Sequence[Part]) -> Scores:
    order = [row for rows, _ in parts for row in rows]
    return Scores.concatenate(scores for _, scores in parts).take(np.argsort(order, kind="stable"))


async def _all(coroutines: Sequence[Coroutine[Any, Any, Value]]) -> list[Value]:
    """Return all results; after the first error, cancel the others and raise it."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
