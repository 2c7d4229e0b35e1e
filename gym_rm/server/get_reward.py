"""HTTP server for OpenRLHF's `POST /get_reward`; concurrent requests are scored together."""

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

from gym_rm.checks import finite, integer
from gym_rm.errors import ConfigError, GymRMError, brief, logger
from gym_rm.scores import ScoringError

MEBIBYTE = 2**20


class RewardLists(Protocol):
    """Interface of `gym_rm.adapters.openrlhf.RewardFunction`."""

    def lists(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Return the rewards as plain lists."""
        ...


class RewardServer:
    """`POST /get_reward` for OpenRLHF's `--reward.remote_url http://127.0.0.1:5000/get_reward`.

    Args:
        reward_function: function that computes the rewards.
        host: address to listen on; an address other than loopback needs a `key`.
        port: port to listen on; 0 for any free port, see `url`.
        key: required as `Authorization: Bearer KEY`, or as the password of the URL `http://any:KEY@host:port/...`. The
            client of OpenRLHF supports only the URL.
        max_request_bytes: maximum size of a request body; a larger one is rejected with status 413.
        timeout: seconds after which a request without a score fails with status 503. OpenRLHF waits for 180 seconds.

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
                f"key is missing, but host={host!r} can be reached from other machines; pass key=, or listen on "
                "127.0.0.1."
            )
        self.reward_function = reward_function
        self.key = key
        self.max_request_bytes = integer("max_request_bytes", max_request_bytes, minimum=1)
        self.timeout = finite("timeout", timeout)
        if self.timeout <= 0:
            raise ConfigError(f"timeout must be positive, got {timeout!r} seconds.")
        self._http = _HTTPServer((host, port), _Handler)
        self._http.endpoint = self
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """URL for `--reward.remote_url`."""
        host, port = self._http.server_address[:2]
        return f"http://{host!s}:{port}/get_reward"

    def serve_forever(self) -> None:
        """Answer requests until another thread calls `close`, or the process is interrupted."""
        logger.info("listening at %s", self.url)
        self._http.serve_forever(poll_interval=0.05)  # maximum seconds that `close` waits

    def start(self) -> RewardServer:
        """Answer requests in a background thread."""
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
        """Return the response to a request body.

        Raises:
            BadRequest: the body does not follow the protocol, or cannot be scored.
            TimeoutError: scoring took longer than `timeout`.
        """
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not valid JSON: {error}") from error
        if not isinstance(request, dict) or not _is_texts(request.get("query")):
            raise BadRequest("query must be a list of texts in a JSON object")
        if request["query"] and not _is_texts(request.get("prompts")):
            raise BadRequest("prompts must be a list of texts; they are needed to separate prompt and reply")
        if not isinstance(request.get("labels"), list | None):
            raise BadRequest("labels must be a list or null")
        try:
            prompts, labels = request.get("prompts") or [], request.get("labels")
            return self.reward_function.lists(request["query"], prompts, labels, timeout=self.timeout)
        except ScoringError as error:
            raise BadRequest(error.summary) from error
        except GymRMError as error:
            raise BadRequest(str(error)) from error

    def allows(self, authorization: str) -> bool:
        """Return whether this `Authorization` header contains the key."""
        if self.key is None:
            return True
        scheme, _, text = authorization.partition(" ")
        given = text.encode("latin-1", "replace")  # http.server decodes headers as Latin-1
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except ValueError:
                return False
        return scheme.lower() in ("basic", "bearer") and hmac.compare_digest(given, self.key.encode())


class BadRequest(GymRMError, ValueError):
    """Invalid request; repeating it gives the same error."""


class _HTTPServer(ThreadingHTTPServer):
    request_queue_size = 1024  # a rollout sends hundreds of requests at once; the default is 5
    daemon_threads = True
    endpoint: RewardServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 60  # seconds after which an idle or very slow connection is closed
    server: _HTTPServer

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(HTTPStatus.OK, {"status": "ok"})
        else:
            self._reply(HTTPStatus.NOT_FOUND, {"error": f"unknown path {self.path}; send POST requests to /get_reward"})

    def do_POST(self) -> None:
        endpoint = self.server.endpoint
        length = self.headers.get("Content-Length", "")
        if self.path.rstrip("/") != "/get_reward":
            self._refuse(HTTPStatus.NOT_FOUND, f"unknown path {self.path}; send POST requests to /get_reward")
        elif not endpoint.allows(self.headers.get("Authorization", "")):
            self._refuse(HTTPStatus.UNAUTHORIZED, "the key is missing or wrong")
        elif not length.isdecimal():
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "Content-Length is missing or invalid")
        elif len(length) > 18 or int(length) > endpoint.max_request_bytes:
            self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body must have at most {endpoint.max_request_bytes} bytes"
            )
        else:
            self._answer(endpoint, self.rfile.read(int(length)))

    def _answer(self, endpoint: RewardServer, body: bytes) -> None:
        try:
            self._reply(HTTPStatus.OK, endpoint.answer(body))
        except BadRequest as error:
            self._reply(HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)})
        except concurrent.futures.TimeoutError:
            self._reply(HTTPStatus.SERVICE_UNAVAILABLE, {"error": f"not scored within {endpoint.timeout} seconds"})
        except Exception as error:  # report every exception of the scorer to the client, and continue
            logger.exception("a request failed")
            self._reply(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": brief(error)})

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        """Respond with an error and close the connection, because the request body has not been read."""
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
