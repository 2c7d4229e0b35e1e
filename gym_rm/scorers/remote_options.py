"""Options of a scorer at a URL. This file needs no httpx, so that help pages can list them."""

from __future__ import annotations

import os
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import pydantic

from gym_rm.checks import finite
from gym_rm.config import Config, Finite, Flag, NonNegativeInt, PositiveInt
from gym_rm.errors import ConfigError


class RemoteOptions(Config):
    """Options of a scorer at a URL."""

    protocol: Literal["auto", "gym_rm", "vllm", "openrlhf"] = "auto"
    """What the server understands; `"auto"` asks it."""
    key: str | None = pydantic.Field(default=None, repr=False)
    """Key, sent as a bearer token; `"env:NAME"` reads the environment variable NAME."""
    timeout: Finite = 300.0
    """Seconds after which a call fails, with all its retries."""
    attempt_timeout: Finite | None = None
    """Seconds after which one request is sent again; None for `timeout`, or a quarter of it if there are several
    servers."""
    startup_timeout: Finite = 5.0
    """Seconds to wait at the start for a server that does not answer."""
    max_retries: NonNegativeInt = 8
    """How often a request is sent again after a failure; the waits between are doubled each time."""
    max_connections: PositiveInt = 32
    """Most requests at the same time to one server."""
    max_conversations: PositiveInt = 256
    """Most conversations in one request; the server's own limits are kept too."""
    local: Any = None
    """The same reward model in this process (argument of `load_scorer`); at the start, its scores of a few
    conversations are compared with those of the server."""
    calibration: Any = None
    """Conversations with known rewards, `[(conversation, reward), ...]`, which are compared at the start."""
    tolerance: Finite = 0.01
    """Largest difference in these comparisons, relative to the largest of the known rewards."""
    label: NonNegativeInt | None = None
    """For vLLM: index of the value that is the reward, if the model returns several."""
    tokenizer: Any = None
    """For OpenRLHF: tokenizer of the reward model, or its folder or hub id."""
    chat_template: str | None = None
    """For vLLM and OpenRLHF: chat template instead of the model's own."""
    chat_template_kwargs: dict[str, Any] | None = None
    """For vLLM and OpenRLHF: other variables of the chat template."""
    max_length: PositiveInt | None = None
    """For vLLM and OpenRLHF: longest conversation in tokens (OpenRLHF: 2048 by default, as in its server)."""
    truncate: Flag = False
    """For vLLM: whether a conversation longer than `max_length` loses its first tokens; otherwise it gets an error."""


def check_options(options: RemoteOptions) -> None:
    """Raise ConfigError for values that are out of range or contradict each other."""
    for name in ("timeout", "attempt_timeout", "startup_timeout", "tolerance"):
        value = getattr(options, name)
        if value is not None and finite(name, value) <= 0:
            raise ConfigError(f"{name} must be positive, got {value!r}.")
    if options.truncate and options.max_length is None:
        raise ConfigError("truncate=True needs max_length=, the number of tokens to keep.")


def read_key(key: str | None) -> str | None:
    """Return the key, read from the environment if it has the form `env:NAME`."""
    if key is not None and key.startswith("env:"):
        name = key.removeprefix("env:")
        if name not in os.environ:
            raise ConfigError(f"key='env:{name}': the environment variable {name} is not set.")
        key = os.environ[name]
    if key is not None and (not key or not key.isascii() or not key.isprintable() or key != key.strip()):
        raise ConfigError("key must be printable ASCII without spaces around it, to fit into an HTTP header.")
    return key


def parse_urls(urls: Any, key: str | None) -> tuple[list[str], str | None]:
    """Return clean URLs without user and password, and the key: the given one, or the password of the URLs.

    Args:
        urls: one URL, several with commas between them, or a list.
        key: the key that was given.

    Raises:
        ConfigError: a URL is invalid, or the passwords differ.
    """
    listed = urls.split(",") if isinstance(urls, str) else list(urls)
    clean: list[str] = []
    keys = set()
    for url in listed:
        try:
            parts = urlsplit(str(url).strip())
            valid = (
                parts.scheme in ("http", "https")
                and parts.hostname
                and (parts.port or 1)
                and not (parts.query or parts.fragment)
            )
        except ValueError:  # for example a port that is no number
            valid = False
        if not valid:
            shown = str(url).rpartition("@")[2]
            raise ConfigError(f"a URL must have the form http://host:port, got {shown!r:.200}.")
        keys.add(None if parts.password is None else unquote(parts.password))
        host = parts.netloc.rpartition("@")[2]
        clean.append(f"{parts.scheme}://{host}{parts.path.rstrip('/')}")
    if len(keys) > 1 and key is None:
        raise ConfigError("the URLs have different passwords; pass one key= for all servers.")
    if not clean or len(set(clean)) != len(clean):
        raise ConfigError(f"expected one or several different URLs, got {clean}.")
    return clean, key if key is not None else keys.pop()
