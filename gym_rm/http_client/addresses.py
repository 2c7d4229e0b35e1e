"""URLs and keys of servers. This file needs no httpx."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote, urlsplit

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


def parse_urls(urls: Any, key: str | None) -> tuple[list[str], str | None]:
    """Return clean URLs without user and password, and the key: the given one, or the password of the URLs.

    Args:
        urls: one URL, several with commas between them, or a list.
        key: the key that was given.

    Raises:
        ConfigError: a URL is invalid, or the passwords differ.
    """
    clean: list[str] = []
    keys = set()
    for url in urls.split(",") if isinstance(urls, str) else list(urls):
        address, password = _parse(str(url).strip())
        clean.append(address)
        keys.add(password)
    if len(keys) > 1 and key is None:
        raise ConfigError("the URLs have different passwords; pass one key= for all servers.")
    if not clean or len(set(clean)) != len(clean):
        raise ConfigError(f"expected one or several different URLs, got {clean}.")
    return clean, key if key is not None else keys.pop()


def _parse(url: str) -> tuple[str, str | None]:
    """Return a URL without user and password, and the password."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
        valid = valid and not (parts.query or parts.fragment)
    except ValueError:  # for example a port that is no number
        valid = False
    if not valid:
        shown = url.rpartition("@")[2]
        raise ConfigError(f"a URL must have the form http://host:port, got {shown!r:.200}.")
    password = None if parts.password is None else unquote(parts.password)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}", password
