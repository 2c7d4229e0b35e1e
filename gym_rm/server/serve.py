"""Run the application on uvicorn: sockets, slow clients, and a shutdown that answers what was accepted."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import threading
import time
from types import FrameType
from typing import Any

from gym_rm.errors import ConfigError, MissingExtraError, logger
from gym_rm.scorer import Scorer
from gym_rm.server.options import ServerOptions, check_host

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from gym_rm.server.app import make_app
    from gym_rm.server.service import Service
except ImportError as missing:
    raise MissingExtraError(
        f"the server needs fastapi, uvicorn and prometheus-client: {missing}. Install them with pip install "
        "'gym-rm[server]'."
    ) from missing

TICK = 0.05  # seconds between two looks at the requests that are still to be answered
CLOSE_TIMEOUT = 1.0  # seconds for the last batch, whose requests are answered or given up by then
KEEP_ALIVE = 60  # seconds that an idle connection of a client stays open
MAX_CONNECTIONS = 8192
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


class RewardServer:
    """A scorer behind HTTP, in this process.

    Args:
        scorer: any scorer; it stays open when the server closes.
        options: options of the server.
        host: address to listen on; an address other than loopback needs a key.
        port: port to listen on; 0 for any free port, see `url`.

    Raises:
        ConfigError: an option is invalid, or the address cannot be used.

    Example:
        >>> with RewardServer(scorer, port=0) as server:  # doctest: +SKIP
        ...     print(server.url)
        http://127.0.0.1:40123
    """

    def __init__(
        self, scorer: Scorer, options: ServerOptions | None = None, *, host: str = "127.0.0.1", port: int = 5000
    ) -> None:
        options = options or ServerOptions()
        check_host(host, options.key)
        self._socket = _listen(host, port)
        try:
            self.app = make_app(scorer, options)
        except BaseException:
            self._socket.close()
            raise
        self.service: Service = self.app.state.service
        self.service.only_loopback = options.key is None
        self._uvicorn = _Uvicorn(_config(self.app, options), self.service)
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Address of the server, without a path."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def serve_forever(self) -> bool:
        """Answer requests until SIGTERM, Ctrl-C or `close`; then answer those that were accepted.

        Returns whether all of them were answered within `drain_timeout`.
        """
        redaction = _Redaction()
        logger.addFilter(redaction)
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            logger.removeFilter(redaction)
            answered = self.service.close(timeout=CLOSE_TIMEOUT)
            self._socket.close()
        return answered

    def start(self) -> RewardServer:
        """Answer requests in a background thread."""
        self._thread = threading.Thread(target=self.serve_forever, name="gym_rm server", daemon=True)
        self._thread.start()
        while not self._uvicorn.started and self._thread.is_alive():
            time.sleep(0.005)
        return self

    def close(self) -> None:
        """Answer the accepted requests, then stop and free the port."""
        if self._thread is not None:
            self._uvicorn.drain()
            self._thread.join()
            self._thread = None
        self._socket.close()

    def __enter__(self) -> RewardServer:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()


class _Uvicorn(uvicorn.Server):
    """Server whose first signal drains, and whose second one stops at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self._drain_until: float | None = None

    def drain(self) -> None:
        """Refuse new requests, and stop when the accepted ones are answered or `drain_timeout` is over."""
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self.service.limits.drain_timeout
            self.service.state = "draining"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM and SIGINT."""
        if self._drain_until is not None:
            self.should_exit = self.force_exit = True
        self.drain()

    async def main_loop(self) -> None:
        """Run until all accepted requests are answered after `drain`."""
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            await asyncio.sleep(TICK)
            if self._drain_until is not None and time.monotonic() > self._drain_until:
                self.service.give_up()
                await asyncio.sleep(TICK)
                self.should_exit = True
            elif self._drain_until is not None and self.service.in_flight == 0:
                self.should_exit = True


class _Protocol(H11Protocol):
    """HTTP/1.1 of uvicorn that closes a connection whose headers do not arrive in time."""

    header_timeout: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is not cycle:
            self._headers_by.cancel()
        elif self._awaits_headers() and self._headers_by.cancelled():  # the next request of a kept connection
            self._await_headers()

    def _await_headers(self) -> None:
        self._headers_by = self.loop.call_later(self.header_timeout, self._close_slow)

    def _awaits_headers(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _close_slow(self) -> None:
        if self._awaits_headers() and not self.transport.is_closing():
            self.transport.close()


class _Redaction(logging.Filter):
    """Replace quoted texts in the log while requests are served, because they can come from a conversation.

    What remains is one of the few sentences of the package, and is logged once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is new."""
        if threading.current_thread().name != "gym_rm micro-batching":
            return True
        record.msg, record.args = QUOTED.sub("'...'", record.getMessage()), None
        if record.msg in self._seen or len(self._seen) > 1000:
            return False
        self._seen.add(record.msg)
        return True


def _config(app: Any, options: ServerOptions) -> uvicorn.Config:
    protocol = type("_TimedProtocol", (_Protocol,), {"header_timeout": options.limits.header_timeout})
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level=logging.CRITICAL,  # its messages have tracebacks with texts of requests
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=1,  # the requests are answered before
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=64 * 1024,
    )


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; a connection made from now on is accepted once the server runs."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen at {host}:{port}: {reason}.") from error
    listener.setblocking(False)
    return listener
