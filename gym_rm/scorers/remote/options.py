"""Options of a scorer at a URL. This file needs no httpx, so that help pages can list them."""

from __future__ import annotations

import pydantic

from gym_rm.config import Config, Finite, NonNegativeInt, PositiveInt


class ConnectionOptions(Config):
    """How a scorer reaches a server."""

    key: str | None = pydantic.Field(default=None, repr=False)
    """Key, sent as a bearer token; `"env:NAME"` reads the environment variable NAME."""
    timeout: Finite = pydantic.Field(default=300.0, gt=0)
    """Seconds after which a call fails, with all its retries."""
    attempt_timeout: Finite | None = pydantic.Field(default=None, gt=0)
    """Seconds after which one request is sent again; None for `timeout`, or a quarter of it if there are several
    servers."""
    max_retries: NonNegativeInt = 8
    """How often a request is sent again after a failure; the waits between are doubled each time."""
    max_connections: PositiveInt = 32
    """Most requests at the same time to one server."""


class RemoteOptions(ConnectionOptions):
    """Options of a scorer at a URL."""

    startup_timeout: Finite = pydantic.Field(default=5.0, gt=0)
    """Seconds to wait at the start for a server that does not answer."""
    max_conversations: PositiveInt = 256
    """Most conversations in one request; the server's own limits are kept too."""
    tokenizer: str | None = None
    """Tokenizer of vLLM's or SGLang's model (folder or hub id); None for the server's, `"server"` to send messages."""
