"""Requests to one or several servers: which server gets a request, when it is sent again, and which error is final.

Everything here runs in one event loop. Scoring has no side effects, so every request may be sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from gym_rm.errors import ConfigError, RemoteError, brief, logger
from gym_rm.scorers.remote_protocols import InvalidReply
from gym_rm.scorers.remote_replies import Busy, Failed, Refused, check_status

Value = TypeVar("Value")

FIRST_WAIT, LONGEST_WAIT = 0.1, 15.0  # seconds between two attempts
CONNECT_SECONDS = 5.0
MAX_REPLY_BYTES = 2**28
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_random = random.SystemRandom()  # not the generator that a training run seeds


@dataclass(frozen=True, slots=True)
class Request:
    """An HTTP request; `body` None is a GET."""

    path: str
    body: bytes | None = None


@dataclass(slots=True, eq=False)
class Endpoint:
    """One server and what is known of its health.

    Attributes:
        url: its URL, without a path at the end and without a key.
        healthy: whether it gets requests.
        outstanding: bytes of the requests that it has not answered.
        requests: number of these requests.
        window: how many requests it may have at the same time: half as many after it asked to wait, more after answers.
        failures: number of failures since its last answer.
        busy_until: time before which it asked not to be sent the same request again.
    """

    url: str
    window: float
    healthy: bool = True
    outstanding: int = 0
    requests: int = 0
    failures: int = 0
    busy_until: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of requests; times in seconds.

    Attributes:
        attempt_timeout: time of one attempt.
        max_retries: how often a request is sent again. Waiting because a server asks to is not counted.
        max_connections: number of requests at the same time to one server.
    """

    attempt_timeout: float
    max_retries: int
    max_connections: int


class Connections:
    """Sends requests to the least loaded healthy server.

    Args:
        urls: one or several servers.
        key: sent as a bearer token.
        limits: limits of requests.
        admit: called for a server that failed; it raises if the server must not come back yet.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        key: str | None,
        limits: Limits,
        admit: Callable[[Endpoint], Awaitable[None]],
    ) -> None:
        self.endpoints = [Endpoint(url, float(limits.max_connections)) for url in urls]
        self._freed = asyncio.Event()
        self._admit = admit
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.max_connections * len(urls))
        self._turn = itertools.count()
        self._probes: dict[Endpoint, asyncio.Task[None]] = {}
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=limits.max_connections * len(urls),
                keepalive_expiry=4.0,  # uvicorn closes idle connections after 5 seconds
            ),
            follow_redirects=False,  # the key must not reach another host
            mounts={f"all://{host}": None for host in LOOPBACK},  # no proxy
        )

    async def close(self) -> None:
        """Stop probing and close all connections."""
        for task in self._probes.values():
            task.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)
        await self._client.aclose()

    async def send(
        self, request: Request, read: Callable[[bytes], Value], deadline: float, *, only: Endpoint | None = None
    ) -> tuple[Value, Endpoint]:
        """Return what `read` makes of the body of the reply, and the server that sent it.

        Args:
            request: the request.
            read: may raise InvalidReply; then the request is sent again.
            deadline: time of the event loop at which to give up.
            only: the only server that may get the request.

        Raises:
            Refused: the request is invalid.
            ConfigError: the key is missing or wrong.
            RemoteError: no server answered before the deadline, or after `max_retries` more attempts.
        """
        state = _Attempts(self._limits.max_retries, deadline)
        slot = self._slots if only is None else contextlib.nullcontext()  # a probe does not wait behind requests
        async with _until(deadline, state, self), slot:
            while True:
                endpoint = only or await self._choose(state)
                await self._wait(endpoint, state)
                if only is None and not self._has_room(endpoint):
                    continue
                try:
                    value = await self._ask(endpoint, request, read, deadline)
                except Failed as failure:
                    self._note(endpoint, failure, probe=only is None)
                    state.add(endpoint, failure)
                    if not isinstance(failure, Busy) and state.failures > self._limits.max_retries:
                        raise self._gave_up(state) from failure
                else:
                    endpoint.failures, endpoint.busy_until, endpoint.healthy = 0, 0.0, True
                    endpoint.window = min(endpoint.window + 1 / endpoint.window, self._limits.max_connections)
                    return value, endpoint

    def _has_room(self, endpoint: Endpoint) -> bool:
        return endpoint.requests < math.floor(endpoint.window)

    async def _choose(self, state: _Attempts) -> Endpoint:
        """Return the healthy server with the least outstanding bytes, in turn if several have the same."""
        while not any(self._has_room(each) for each in self._candidates()):
            self._freed.clear()
            await self._freed.wait()
        now = asyncio.get_running_loop().time()
        first = next(self._turn) % len(self.endpoints)
        turned = self.endpoints[first:] + self.endpoints[:first]

        def order(endpoint: Endpoint) -> tuple[Any, ...]:
            waits = max(endpoint.busy_until - now, 0.0) if len(self.endpoints) > 1 else 0.0
            return (
                not endpoint.healthy,
                not self._has_room(endpoint),
                waits,
                endpoint is state.last,
                endpoint.outstanding,
            )

        return min(turned, key=order)

    def _candidates(self) -> list[Endpoint]:
        """Return the healthy servers, or all if none is healthy."""
        return [each for each in self.endpoints if each.healthy] or self.endpoints

    async def _wait(self, endpoint: Endpoint, state: _Attempts) -> None:
        """Wait until the server may be asked again; raise RemoteError if that is after the deadline."""
        now = asyncio.get_running_loop().time()
        asked = state.not_before.get(endpoint, now) - now
        seconds = max(asked, state.pause if endpoint is state.last or not endpoint.healthy else 0.0)
        if now + asked > state.deadline:
            raise self._gave_up(state, f"it asks to wait {asked:.1f} s, longer than timeout=, and ")
        if seconds > 0:
            await asyncio.sleep(seconds + _random.uniform(0, seconds / 10))  # so that not all come back at once

    async def _ask(
        self, endpoint: Endpoint, request: Request, read: Callable[[bytes], Value], deadline: float
    ) -> Value:
        """Send a request once."""
        seconds = min(self._limits.attempt_timeout, deadline - asyncio.get_running_loop().time())
        size = len(request.body or b"")
        endpoint.outstanding, endpoint.requests = endpoint.outstanding + size, endpoint.requests + 1
        try:
            async with asyncio.timeout(seconds):
                status, headers, body = await self._exchange(endpoint, request, seconds)
            check_status(endpoint.url + request.path, status, headers, body)
            return read(body)
        except TimeoutError as error:
            raise Failed(f"no answer within {seconds:.1f} s") from error
        except InvalidReply as error:
            raise Failed(f"invalid reply: {error}") from error
        except httpx.TransportError as error:
            raise Failed(brief(error)) from error
        except httpx.HTTPError as error:
            raise Failed(f"invalid reply: {brief(error)}") from error
        finally:
            endpoint.outstanding, endpoint.requests = endpoint.outstanding - size, endpoint.requests - 1
            self._freed.set()

    async def _exchange(self, endpoint: Endpoint, request: Request, seconds: float) -> tuple[int, httpx.Headers, bytes]:
        timeout = httpx.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds))
        headers = {"Content-Type": "application/json"} if request.body is not None else {}
        method = "GET" if request.body is None else "POST"
        sent = self._client.stream(
            method, endpoint.url + request.path, content=request.body, headers=headers, timeout=timeout
        )
        async with sent as response:
            parts, size = [], 0
            async for part in response.aiter_bytes():
                parts.append(part)
                size += len(part)
                if size > MAX_REPLY_BYTES:
                    raise InvalidReply(f"the reply has more than {MAX_REPLY_BYTES} bytes")
            return response.status_code, response.headers, b"".join(parts)

    def _note(self, endpoint: Endpoint, failure: Failed, *, probe: bool) -> None:
        """Remember a failure. A server that failed gets no requests until it answers again."""
        if isinstance(failure, Busy):
            endpoint.busy_until = asyncio.get_running_loop().time() + failure.seconds
            endpoint.window = max(endpoint.window / 2, 1.0)
            return
        endpoint.failures += 1
        if not probe or len(self.endpoints) == 1:
            return
        if endpoint.healthy:
            logger.warning("%s gets no requests for now: %s", endpoint.url, failure)
        self.exclude(endpoint)

    def exclude(self, endpoint: Endpoint) -> None:
        """Give a server no requests until `admit` accepts it."""
        endpoint.healthy = False
        self._freed.set()
        if endpoint not in self._probes or self._probes[endpoint].done():
            self._probes[endpoint] = asyncio.create_task(self._probe(endpoint))

    async def _probe(self, endpoint: Endpoint) -> None:
        """Ask a server again and again whether it is back."""
        told = ""
        while not endpoint.healthy:
            await asyncio.sleep(backoff(endpoint.failures))
            try:
                await self._admit(endpoint)
            except (RemoteError, Refused, ConfigError) as error:
                endpoint.failures += 1
                if isinstance(error, ConfigError) and told != str(error):
                    told = str(error)
                    logger.warning("%s stays without requests: %s", endpoint.url, error)
            else:
                endpoint.failures, endpoint.healthy = 0, True
                self._freed.set()
                logger.warning("%s gets requests again", endpoint.url)

    def _gave_up(self, state: _Attempts, why: str = "") -> RemoteError:
        names = ", ".join(endpoint.url for endpoint in self.endpoints)
        return RemoteError(
            f"no answer from {names}: {why}{state.described()}. Check that the server runs and that the URL is right, "
            "or pass a larger timeout= or max_retries=."
        )


class _Attempts:
    """The failed attempts of one request."""

    def __init__(self, max_retries: int, deadline: float) -> None:
        self.deadline = deadline
        self.failures = 0
        self.total = 0
        self.last: Endpoint | None = None
        self.pause = 0.0
        self.not_before: dict[Endpoint, float] = {}
        self._reason = ""

    def add(self, endpoint: Endpoint, failure: Failed) -> None:
        """Count a failed attempt."""
        self.total += 1
        self.failures += not isinstance(failure, Busy)
        self.last = endpoint
        self.pause = backoff(self.failures) if not isinstance(failure, Busy) else 0.0
        if isinstance(failure, Busy):
            self.not_before[endpoint] = endpoint.busy_until
        self._reason = f"{endpoint.url}: {failure}"

    def described(self) -> str:
        """Return the number of attempts and the reason of the last failure."""
        if not self.total:
            return "no answer came"
        return f"{self.total} attempt{'' if self.total == 1 else 's'} failed, the last with {self._reason}"


class _until:
    """Context manager like `asyncio.timeout_at` that raises RemoteError with what was tried."""

    def __init__(self, deadline: float, state: _Attempts, owner: Connections) -> None:
        self._state, self._owner = state, owner
        self._timeout = asyncio.timeout_at(deadline)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError as expired:
            raise self._owner._gave_up(self._state, "the time is over, ") from expired


def backoff(failures: int) -> float:
    """Return the seconds to wait after this many failures: doubled each time, and a random part of it."""
    longest = min(FIRST_WAIT * 2.0 ** min(failures, 16), LONGEST_WAIT)
    return _random.uniform(longest / 2, longest)
