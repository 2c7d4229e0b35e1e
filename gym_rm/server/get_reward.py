"""An HTTP endpoint that answers OpenRLHF's `POST /get_reward`; requests that arrive together are scored together."""

from __future__ import annotations

import base64
import concurrent.futures
import hmac
import ipaddress
import json
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from gym_rm.errors import ConfigError, GymRMError, logger

MEBIBYTE = 2**20


class RewardLists(Protocol):
    """What answers: `gym_rm.adapters.openrlhf.RewardFunction`."""

    def lists(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """The reply as plain lists."""
        ...


class RewardServer:
    """`POST /get_reward` for OpenRLHF's `--reward.remote_url http://127.0.0.1:5000/get_reward`.

    Args:
        reward_function: what answers.
        host: where to listen; anything but a loopback address needs a `key`.
        port: 0 for any that is free, see `url`.
        key: asked for as `Authorization: Bearer KEY`, or as the password of a URL `http://any:KEY@host:port/...`, which
            is all that OpenRLHF's client can send.
        max_request_bytes: a larger body is refused (413).
        timeout: seconds after which a request that is still not scored is given up (503); OpenRLHF waits for 180.

    Example:
        >>> with RewardServer(reward_function, port=0) as server:  # doctest: +SKIP
        ...     print(server.url)
        http://127.0.0.1:40123/get_reward
    """

    def __init__(
        self,
        reward_function: RewardLists,
        *,
        host: str = "127.0.0.1",
        port: int = 5000,
        key: str | None = None,
        max_request_bytes: int = 16 * MEBIBYTE,
        timeout: float = 150.0,
    ) -> None:
        if key is None and not _is_loopback(host):
            raise ConfigError(
                f"host={host!r} can be reached from other machines, and there is no key: anyone could use the reward "
                "model. Pass key=, or listen on 127.0.0.1."
            )
        self.reward_function = reward_function
        self.key = key
        self.max_request_bytes = max_request_bytes
        self.timeout = timeout
        self._http = _HTTPServer((host, port), _Handler)
        self._http.endpoint = self
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """What to give to `--reward.remote_url`."""
        host, port = self._http.server_address[:2]
        return f"http://{host!s}:{port}/get_reward"

    def serve_forever(self) -> None:
        """Answer until `close` is called from another thread, or the process is interrupted."""
        logger.info("answering at %s", self.url)
        self._http.serve_forever(poll_interval=0.05)  # seconds until `close` is noticed

    def start(self) -> RewardServer:
        """Answer from a thread of its own."""
        self._thread = threading.Thread(target=self.serve_forever, name="gym_rm reward server", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop answering and free the port."""
        if self._thread is not None:
            self._http.shutdown()
            self._thread.join()
            self._thread = None
        self._http.server_close()

    def __enter__(self) -> RewardServer:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def answer(self, body: bytes) -> dict[str, Any]:
        """The reply to a request body.

        Raises:
            BadRequest: it does not follow the protocol, or cannot be scored.
            TimeoutError: it took longer than `timeout`.
        """
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {error}") from error
        if not isinstance(request, dict) or not _is_texts(request.get("query")):
            raise BadRequest("expected an object with 'query', a list of texts")
        if request["query"] and not _is_texts(request.get("prompts")):
            raise BadRequest("expected 'prompts', a list of texts: without them prompt and reply cannot be told apart")
        if not isinstance(request.get("labels"), list | None):
            raise BadRequest("expected 'labels', a list, or none")
        try:
            prompts, labels = request.get("prompts") or [], request.get("labels")
            return self.reward_function.lists(request["query"], prompts, labels, timeout=self.timeout)
        except GymRMError as error:
            raise BadRequest(str(error)) from error

    def allows(self, authorization: str) -> bool:
        """Whether this `Authorization` header holds the key."""
        if self.key is None:
            return True
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).decode().partition(":")[2]
            except ValueError:
                return False
        return scheme.lower() in ("basic", "bearer") and hmac.compare_digest(given.encode(), self.key.encode())


class BadRequest(GymRMError, ValueError):
    """A request that cannot be answered; asking again will not help."""


class _HTTPServer(ThreadingHTTPServer):
    request_queue_size = 1024  # a rollout posts hundreds of samples at once; the default backlog is 5
    daemon_threads = True
    endpoint: RewardServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 60  # seconds that an idle or a very slow connection is kept
    server: _HTTPServer

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(HTTPStatus.OK, {"status": "ok"})
        else:
            self._reply(HTTPStatus.NOT_FOUND, {"error": f"unknown path {self.path}; post to /get_reward"})

    def do_POST(self) -> None:
        endpoint = self.server.endpoint
        length = self.headers.get("Content-Length", "")
        if self.path.rstrip("/") != "/get_reward":
            self._refuse(HTTPStatus.NOT_FOUND, f"unknown path {self.path}; post to /get_reward")
        elif not endpoint.allows(self.headers.get("Authorization", "")):
            self._refuse(HTTPStatus.UNAUTHORIZED, "this server asks for a key")
        elif not length.isdecimal():
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "expected a Content-Length")
        elif int(length) > endpoint.max_request_bytes:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"over {endpoint.max_request_bytes} bytes")
        else:
            self._answer(endpoint, self.rfile.read(int(length)))

    def _answer(self, endpoint: RewardServer, body: bytes) -> None:
        try:
            self._reply(HTTPStatus.OK, endpoint.answer(body))
        except BadRequest as error:
            self._reply(HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)})
        except concurrent.futures.TimeoutError:
            self._reply(HTTPStatus.SERVICE_UNAVAILABLE, {"error": f"not scored within {endpoint.timeout} seconds"})
        except Exception as error:  # the scorer's own, whatever it is: told to the client, and the server goes on
            logger.exception("a request failed")
            self._reply(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"})

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        """Reply without having read the body, after which the connection cannot be used again."""
        self.close_connection = True
        self._reply(status, {"error": reason})

    def _reply(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s %s", self.address_string(), format % args)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
