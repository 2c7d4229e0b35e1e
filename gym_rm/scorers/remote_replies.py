"""What a reply means: an answer, a refused request, a server that asks to wait, or a failure to try again."""

from __future__ import annotations

import email.utils
import math
import time
from collections.abc import Mapping

from gym_rm.errors import ConfigError, RemoteError
from gym_rm.scorers.remote_protocols import InvalidReply, parse_json

SHORTEST_WAIT = 0.1  # seconds, if a server asks to wait


class Refused(Exception):
    """The server says that the request is invalid. To send it again would not help, but a part of it may be valid."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        self.reason = reason
        super().__init__(f"status {status}: {reason}")


class Missing(RemoteError):
    """The server has no such route."""


class Failed(Exception):
    """An attempt failed in a way that another attempt may not."""


class Busy(Failed):
    """The server asks to wait."""

    def __init__(self, reason: str, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(reason)


def check_status(url: str, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """Raise what a status other than 200 means."""
    if status == 200:
        return
    reason = _reason(body)
    if status in (401, 403):
        raise ConfigError(f"{url} refused the key (status {status}: {reason}); pass key= with the server's key.")
    if 300 <= status < 400:
        raise RemoteError(
            f"{url} redirects to {headers.get('Location', 'nowhere')!r:.200}, which is not followed, because the key "
            "would be sent there; pass that URL if you trust it."
        )
    if status in (404, 405):
        raise Missing(f"{url} does not exist (status {status}: {reason}); check the URL and protocol=.")
    if status == 501:
        raise ConfigError(f"{url} cannot do this (status 501: {reason}).")
    wait = retry_after(headers.get("Retry-After"))
    if status in (429, 503) and wait is not None:
        raise Busy(f"status {status}: {reason}", max(wait, SHORTEST_WAIT))
    if status >= 500 or status in (408, 425, 429):
        raise Failed(f"status {status}: {reason}")
    if status >= 400:
        raise Refused(status, reason)
    raise Failed(f"unexpected status {status}: {reason}")


def retry_after(value: str | None) -> float | None:
    """Return the seconds of a `Retry-After` header (seconds or a date); None if there is none or it is invalid."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
        return max(seconds, 0.0)
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _reason(body: bytes) -> str:
    """Return the message of an error body, or its start."""
    try:
        content = parse_json(body)
    except InvalidReply:
        return body[:200].decode(errors="replace") or "no reason"
    for name in ("error", "message", "detail"):
        while isinstance(content, dict) and name in content:
            content = content[name]
    return str(content)[:500]
