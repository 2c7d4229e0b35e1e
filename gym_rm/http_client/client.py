"""One HTTP client for remote scorers, judges and samplers: which server gets a request, and when it is sent again.

Scoring and sampling have no side effects, so every request may be sent again. All clients of a process share one
thread with an event loop, so that their callers may be in event loops of their own, as in a notebook.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar

from gym_rm.async_calls import EventLoop
from gym_rm.errors import MissingExtraError, RemoteError, brief, logger
from gym_rm.http_client.responses import Busy, FailedAttempt, InvalidReply, check_status

try:
    import httpx
except ImportError as missing:
    raise MissingExtraError(f"a URL needs httpx; run pip install 'gym-rm[server]' ({missing}).") from missing

Value = TypeVar("Value")

FIRST_WAIT, LONGEST_WAIT = 0.1, 15.0  # seconds between two attempts
CONNECT_SECONDS = 5.0
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_random = random.SystemRandom()  # not the generator that a training run seeds
_inherited: list[Any] = []


@dataclass(slots=True, eq=False)
class Endpoint:
    """One server and what is known of its health.

    Attributes:
        url: its URL, without a path at the end and without a key.
        open_requests: number of requests that it has not answered.
        failures: how often it failed since its last answer; failures at the same time count once.
        rest_until: time of the event loop before which it gets no requests, because it failed or asked to wait.
    """

    url: str
    open_requests: int = 0
    failures: int = 0
    rest_until: float = 0.0


@dataclass(frozen=True, slots=True)
class _Connected:
    """The connections of one process, its free slots, and the event that is set after every attempt."""

    process: int
    client: httpx.AsyncClient
    slots: asyncio.Semaphore
    attempt_ended: asyncio.Event


class HTTPClient:
    """Sends requests to the least loaded of one or several servers.

    A server that fails rests, longer each time, and then gets one request to show that it is back. A client can be
    pickled, and used in a fork of its process; connections are made anew there.

    Args:
        urls: the servers, without keys.
        key: sent as a bearer token.
        attempt_timeout: seconds of one attempt.
        max_retries: how often a request is sent again. Waiting because a server asks to is not counted.
        max_connections: most requests at the same time to one server.
        recheck: called for one of several servers that failed, before it gets requests again; it raises FailedAttempt
            if the server must wait longer.
    """

    _loop = EventLoop("gym_rm http")  # of all clients
    submit, run = _loop.submit, _loop.run

    def __init__(
        self,
        urls: Sequence[str],
        *,
        key: str | None = None,
        attempt_timeout: float,
        max_retries: int,
        max_connections: int,
        recheck: Callable[[Endpoint], Awaitable[None]] | None = None,
    ) -> None:
        self.endpoints = [Endpoint(url) for url in urls]
        self._key, self._attempt_timeout = key, attempt_timeout
        self._max_retries, self._max_connections, self._recheck = max_retries, max_connections, recheck
        self._connected: _Connected | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without connections; it has the key."""
        endpoints = [Endpoint(endpoint.url) for endpoint in self.endpoints]
        return {**self.__dict__, "_connected": None, "endpoints": endpoints}

    def close(self) -> None:
        """Close all connections; another request would open new ones."""
        connected, self._connected = self._connected, None
        if connected is not None and connected.process == os.getpid():
            self.run(connected.client.aclose())

    async def send(
        self,
        path: str,
        body: bytes | None = None,
        *,
        read: Callable[[bytes], Value],
        deadline: float,
        only: Endpoint | None = None,
        max_retries: int | None = None,
        cookies: dict[str, str] | None = None,
    ) -> tuple[Value, Endpoint]:
        """Return what `read` makes of the body of the reply, and the server that sent it.

        Args:
            body: JSON to POST; None to GET.
            read: may raise InvalidReply; then the request is sent again.
            deadline: time of the event loop at which to give up.
            only: the only server that may get the request.
            max_retries: instead of the client's.
            cookies: sent with the request; those of the reply are added to them. Cookies are kept nowhere else.

        Raises:
            Refused: the request is invalid.
            ConfigError: the key is missing or wrong.
            RemoteError: no server answered before the deadline, or after `max_retries` more attempts.
        """
        failures: list[str] = []
        counted = 0
        connected = self._connect()
        slot = connected.slots if only is None else contextlib.nullcontext()  # a check does not wait behind requests
        try:
            async with asyncio.timeout_at(deadline), slot:
                while True:
                    endpoint = await self._choose(only)
                    endpoint.open_requests += 1
                    try:
                        if self._recheck and endpoint.failures and only is None and len(self.endpoints) > 1:
                            await self._recheck(endpoint)
                        value = read(await self._attempt(endpoint.url + path, body, cookies))
                        if only is None:
                            endpoint.failures, endpoint.rest_until = 0, 0.0
                        return value, endpoint
                    except (FailedAttempt, InvalidReply) as failure:
                        invalid = "invalid reply: " if isinstance(failure, InvalidReply) else ""
                        failures.append(f"{endpoint.url}: {invalid}{failure}")
                        self.rest(endpoint, failure)
                        counted += not isinstance(failure, Busy)
                        if counted > (self._max_retries if max_retries is None else max_retries):
                            raise self._gave_up(failures) from failure
                    finally:
                        endpoint.open_requests -= 1
                        connected.attempt_ended.set()
        except TimeoutError as expired:
            raise self._gave_up(failures, "the time is over, ") from expired

    @staticmethod
    async def all_of(coroutines: Iterable[Coroutine[Any, Any, Value]]) -> list[Value]:
        """Return all results; after the first error, cancel the others and raise it."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(coroutine) for coroutine in coroutines]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def rest(self, endpoint: Endpoint, failure: Exception) -> None:
        """Give a server no requests for a while, because of this failure."""
        now = asyncio.get_running_loop().time()
        if isinstance(failure, Busy):
            endpoint.rest_until = max(endpoint.rest_until, now + failure.seconds)
        elif now >= endpoint.rest_until:  # else it is one of several requests that failed together
            if not endpoint.failures and len(self.endpoints) > 1:
                logger.warning("%s gets no requests for now: %s", endpoint.url, failure)
            endpoint.failures += 1
            endpoint.rest_until = now + backoff(endpoint.failures)

    def _connect(self) -> _Connected:
        """Return the connections of this process."""
        if self._connected is None or self._connected.process != os.getpid():
            if self._connected is not None:
                _inherited.append(self._connected)  # of the parent process: its sockets must not be closed here
            connections = self._max_connections * len(self.endpoints)
            client = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                limits=httpx.Limits(
                    max_connections=None,
                    max_keepalive_connections=connections,
                    keepalive_expiry=4.0,  # uvicorn closes idle connections after 5 seconds
                ),
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
                follow_redirects=False,  # the key must not reach another host
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # no sessions that requests would share
                mounts={f"all://{host}": None for host in LOOPBACK},  # no proxy
            )
            self._connected = _Connected(os.getpid(), client, asyncio.Semaphore(connections), asyncio.Event())
            for endpoint in self.endpoints:
                endpoint.open_requests, endpoint.rest_until = 0, 0.0
        return self._connected

    async def _choose(self, only: Endpoint | None) -> Endpoint:
        """Return the server with the fewest open requests, once one of them has a slot and does not rest."""
        candidates = self.endpoints if only is None else [only]
        loop, attempt_ended = asyncio.get_running_loop(), self._connect().attempt_ended
        while True:
            now = loop.time()
            free = [one for one in candidates if one.rest_until <= now and (only or self._has_slot(one))]
            if free:
                return min(free, key=lambda one: one.open_requests)
            resting = [one.rest_until for one in candidates if one.rest_until > now]
            attempt_ended.clear()
            wait = min(resting) - now if resting else None
            jitter = _random.uniform(0, wait / 10) if wait else 0.0  # so that not all come back at once
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if wait is None else wait + jitter):
                    await attempt_ended.wait()

    def _has_slot(self, endpoint: Endpoint) -> bool:
        on_trial = endpoint.failures > 0 and len(self.endpoints) > 1
        return endpoint.open_requests < (1 if on_trial else self._max_connections)

    async def _attempt(self, url: str, body: bytes | None, cookies: dict[str, str] | None) -> bytes:
        """Send a request once, and return the body of its reply."""
        method, headers = ("GET", {}) if body is None else ("POST", {"Content-Type": "application/json"})
        if cookies:
            headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        try:
            async with asyncio.timeout(self._attempt_timeout):
                response = await self._connect().client.request(method, url, content=body, headers=headers)
        except TimeoutError as error:
            raise FailedAttempt(f"no answer within {self._attempt_timeout:.1f} s") from error
        except httpx.HTTPError as error:
            raise FailedAttempt(brief(error)) from error
        check_status(url, response.status_code, response.headers, response.content)
        if cookies is not None:
            for header in response.headers.get_list("set-cookie"):
                name, _, value = header.partition(";")[0].partition("=")
                cookies[name.strip()] = value.strip()
        return response.content

    def _gave_up(self, failures: list[str], why: str = "") -> RemoteError:
        names = ", ".join(endpoint.url for endpoint in self.endpoints)
        tried = "no answer came"
        if failures:
            plural = "" if len(failures) == 1 else "s"
            tried = f"{len(failures)} attempt{plural} failed, the last with {failures[-1]}"
        return RemoteError(
            f"no answer from {names}: {why}{tried}. Check that the server runs and that the URL is right, "
            "or pass a larger timeout= or max_retries=."
        )


def backoff(failures: int) -> float:
    """Return the seconds to wait after this many failures: doubled each time, and a random part of it."""
    longest = min(FIRST_WAIT * 2.0 ** min(failures, 16), LONGEST_WAIT)
    return _random.uniform(longest / 2, longest)
