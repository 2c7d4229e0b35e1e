"""The guard in front of all routes: key, size and speed of bodies, shutdown, metrics."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gym_rm.errors import logger
from gym_rm.server.options import is_loopback
from gym_rm.server.responses import RequestError, error_response
from gym_rm.server.service import Service, type_and_place

OPEN_PATHS = frozenset({"/", "/health", "/ready"})
LINGER_SECONDS = 1.0
BYTES_PER_BYTE, BYTES_PER_VALUE = 16, 200  # most that was measured, rounded up


class RequestGuard:
    """ASGI application that checks a request before it reaches the routes, and counts it.

    `paths` are those of the routes; the metrics count requests for others together.
    """

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str]) -> None:
        self.app, self.service, self.paths = app, service, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; connections of other sorts than HTTP are closed."""
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1003})
        elif scope["type"] != "http":
            await self.app(scope, receive, send)
        else:
            await _Exchange(self, scope, receive, send).run()


class _Exchange:
    """One request and its reply."""

    def __init__(self, guard: RequestGuard, scope: Scope, receive: Receive, send: Send) -> None:
        self.app, self.service, self.paths, self.scope = guard.app, guard.service, guard.paths, scope
        self._receive, self._send = receive, send
        self.path: str = scope["path"]
        self.status = 0
        self.memory = 0
        self.body: bytes | None = None
        self.more = True

    async def run(self) -> None:
        service, start = self.service, time.perf_counter()
        scoring = self.scope["method"] not in ("GET", "HEAD")
        accepted = scoring and service.state != "draining"
        service.in_flight += accepted
        try:
            if scoring and not accepted:
                raise service.draining()
            if self.path not in OPEN_PATHS:
                self._check_caller()
            if self._header(b"content-length") and self._header(b"transfer-encoding"):
                raise RequestError("bad_request", "send Content-Length or Transfer-Encoding, not both.")
            if scoring:
                # A page of another site may send other types without asking this server first, as a form does.
                kind = (self._header(b"content-type") or b"").partition(b";")[0].strip().lower()
                if kind != b"application/json":
                    raise RequestError(
                        "unsupported_media_type", "send the body with the header Content-Type: application/json."
                    )
                self.body = await self._read_body()
            self.scope["release_memory"] = self._release
            await self.app(self.scope, self._replay, self._count)
        except RequestError as refused:
            await self._refuse(refused)
        except Exception as error:
            logger.error("a request raised %s\n%s", *type_and_place(error))
            if not self.status:
                await self._refuse(RequestError("scorer_error", "the server failed; its log has the place."))
        finally:
            service.in_flight -= accepted
            self._release()
            route = self.path if self.path in self.paths else "other"
            service.metrics.requests.labels(route, str(self.status)).inc()
            service.metrics.latency.labels(route).observe(time.perf_counter() - start)

    def _release(self) -> None:
        """Count the request no longer: it is answered, or waits for others, which the limit must not keep out."""
        self.service.memory -= self.memory
        self.memory = 0

    def _header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.scope["headers"] if key == name), None)

    def _check_caller(self) -> None:
        """Refuse a wrong key, and a page of another site that made its own name point to this machine."""
        key, host = self.service.options.key, (self._header(b"host") or b"localhost").decode("latin-1")
        if key is not None and not allows(key, self._header(b"authorization") or b""):
            raise RequestError(
                "unauthorized", "the key is missing or wrong; send the header Authorization: Bearer KEY."
            )
        own, *_ = self.scope.get("server") or [None]
        if self.service.only_loopback and not is_loopback(name := host_name(host)) and name != own:
            raise RequestError(
                "wrong_host",
                f"the header Host is {host[:80]!r}, but a server without a key answers only to localhost and its own "
                "address; send the request to 127.0.0.1, or start the server with a key.",
            )

    async def _read_body(self) -> bytes:
        limits, service = self.service.limits, self.service
        length = self._header(b"content-length")
        if length is not None and (len(length) > 18 or int(length) > limits.max_body_bytes):
            raise self._too_large()
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(limits.body_timeout):
                while self.more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise RequestError("bad_request", "the client closed the connection.")
                    chunk, self.more = message.get("body", b""), message.get("more_body", False)
                    chunks.append(chunk)
                    size += len(chunk)
                    cost = memory_of(chunk)
                    self.memory += cost
                    service.memory += cost
                    if size > limits.max_body_bytes or self.memory > limits.max_memory_bytes:
                        raise self._too_large()
                    if service.memory > limits.max_memory_bytes:
                        raise RequestError("memory", "too many large requests at once; try again later.", retry_after=1)
        except TimeoutError:
            raise RequestError(
                "body_timeout", f"the body did not arrive within {limits.body_timeout:g} seconds (body_timeout)."
            ) from None
        return b"".join(chunks)

    def _too_large(self) -> RequestError:
        limits = self.service.limits
        return RequestError(
            "body_too_large",
            f"the body must have at most {limits.max_body_bytes} bytes, and need at most max_memory_bytes="
            f"{limits.max_memory_bytes} of memory; send several requests.",
        )

    async def _replay(self) -> Message:
        if self.body is None:
            return await self._receive()
        body, self.body = self.body, None
        self.scope["state"] = {**self.scope.get("state", {})}
        return {"type": "http.request", "body": body, "more_body": False}

    async def _count(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.service.state == "draining":
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
        async with asyncio.timeout(self.service.limits.body_timeout):  # a client that does not read its reply
            await self._send(message)

    async def _refuse(self, refused: RequestError) -> None:
        """Reply with an error and close the connection, because the body may not have been read."""
        self.service.metrics.refusals.labels(refused.reason).inc()
        await self._discard()  # a client that still sends would otherwise get a reset instead of the reply
        response = error_response(refused, self.path)
        response.headers["connection"] = "close"
        self.status = response.status_code
        with contextlib.suppress(OSError):
            await response(self.scope, self._receive, self._send)

    async def _discard(self) -> None:
        length = self._header(b"content-length")
        chunked = self._header(b"transfer-encoding") is not None
        if not chunked and (length is None or len(length) > 18 or int(length) > 8 * self.service.limits.max_body_bytes):
            return
        left = self.service.limits.max_body_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while self.more and left > 0:
                    message = await self._receive()
                    left, self.more = left - len(message.get("body", b"")), message.get("more_body", False)


def memory_of(body: bytes) -> int:
    """Return how many bytes of memory a JSON body can need until it is answered.

    A character of a text is copied a few times. Every value follows one of these marks, and becomes several objects.
    """
    return BYTES_PER_BYTE * len(body) + BYTES_PER_VALUE * sum(map(body.count, b"[{,:"))


def host_name(host: str) -> str:
    """Return the name or address of a `Host` header, without the port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def allows(key: str, authorization: bytes) -> bool:
    """Return whether an `Authorization` header has the key, as a bearer token or as the password of a URL."""
    scheme, _, given = authorization.partition(b" ")
    given = given.strip()
    if scheme.lower() == b"basic":
        try:
            given = base64.b64decode(given, validate=True).partition(b":")[2]
        except ValueError:
            return False
    return scheme.lower() in (b"basic", b"bearer") and hmac.compare_digest(given, key.encode())
