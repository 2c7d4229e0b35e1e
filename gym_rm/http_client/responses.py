"""What a response means: a body to read, a refused request, a server that asks to wait, or an attempt to repeat."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gym_rm.documents import parse_json
from gym_rm.errors import ConfigError, GymRMError, RemoteError

SHORTEST_WAIT = 0.1  # seconds, if a server asks to wait


class Refused(Exception):
    """The server says that the request is invalid. To send it again would not help, but a part of it may be valid."""

    def __init__(self, status: int, reason: str) -> None:
        self.reason = reason
        super().__init__(f"status {status}: {reason}")


class NoSuchRoute(RemoteError):
    """The server has no such route."""


class FailedAttempt(Exception):
    """An attempt failed in a way that another attempt may not."""


class Busy(FailedAttempt):
    """The server asks to wait."""

    def __init__(self, reason: str, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(reason)


class InvalidReply(GymRMError, ValueError):
    """The reply of a server is not what its protocol promises; an attempt that fails with it is repeated."""


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
        no_model = f"{url} answers: {reason}" if re.search("model.* does not exist", reason) else None
        raise NoSuchRoute(no_model or f"{url} does not exist (status {status}: {reason}); check the URL.")
    if status == 501:
        raise ConfigError(f"{url} cannot do this (status 501: {reason}).")
    wait = retry_after(headers.get("Retry-After"))
    if status in (429, 503) and wait is not None:
        raise Busy(f"status {status}: {reason}", max(wait, SHORTEST_WAIT))
    if 400 <= status < 500 and status not in (408, 425, 429):
        raise Refused(status, reason)
    raise FailedAttempt(f"status {status}: {reason}")


def retry_after(value: str | None) -> float | None:
    """Return the seconds of a `Retry-After` header; None if there is none, or it is a date or invalid."""
    return float(value) if value is not None and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value) else None


def parse_body(body: bytes) -> Any:
    """Return the value of a JSON body. Raises InvalidReply if it is not valid JSON."""
    try:
        return parse_json(body)
    except ValueError as error:
        raise InvalidReply(f"the reply is not valid JSON: {error}: {body[:80]!r}") from error


def first_model(body: Any) -> tuple[str, str]:
    """Return the id and the owner of the first model in the reply to `GET /v1/models`. Raises InvalidReply."""
    models = body.get("data") if isinstance(body, Mapping) else None
    first = models[0] if isinstance(models, list) and models else None
    if not isinstance(first, Mapping) or not isinstance(first.get("id"), str):
        raise InvalidReply(f"expected a list of models, got {body!r:.100}")
    return first["id"], str(first.get("owned_by") or "vllm")


def _reason(body: bytes) -> str:
    """Return the message of an error body, or its start."""
    try:
        content = parse_body(body)
    except InvalidReply:
        return body[:200].decode(errors="replace") or "no reason"
    for name in ("error", "message", "detail"):
        while isinstance(content, dict) and name in content:
            content = content[name]
    return str(content)[:500]
