"""URLs and keys of servers. This file needs no httpx."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from gym_rm.errors import ConfigError


def read_key(key: str | None) -> str | None:
    """Return the key, read from the environment if it has the form `env:NAME`.

    Raises:
        ConfigError: there is no such variable, or the key does not fit into an HTTP header.
    """
    if key is not None and key.startswith("env:"):
        name = key.removeprefix("env:")
        if name not in os.environ:
            raise ConfigError(f"key='env:{name}': the environment variable {name} is not set.")
        key = os.environ[name]
    if key is not None and (not key or not key.isascii() or not key.isprintable() or key != key.strip()):
        raise ConfigError("key must be printable ASCII without spaces around it, to fit into an HTTP header.")
    return key


def parse_urls(urls: Any) -> list[str]:
    """Return the given URLs, checked and without a slash at the end: one, several with commas between them, or a list.

    Raises:
        ConfigError: a URL is invalid, or has a password, or is given twice.
    """
    clean = [_parse(str(url).strip()) for url in (urls.split(",") if isinstance(urls, str) else urls)]
    if not clean or len(set(clean)) != len(clean):
        raise ConfigError(f"expected one or several different URLs, got {clean}.")
    return clean


def _parse(url: str) -> str:
    shown = url.rpartition("@")[2]
    try:
        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
        valid = is_http and not (parts.query or parts.fragment)
    except ValueError:  # for example a port that is no number
        valid = False
    if not valid:
        raise ConfigError(f"a URL must have the form http://host:port, got {shown!r:.200}.")
    if "@" in parts.netloc:
        raise ConfigError(f"the URL of {shown!r:.200} must have no user and password; pass key='env:NAME'.")
    return url.rstrip("/")
