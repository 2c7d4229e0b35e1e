"""Replies of the server: JSON, and refused requests in the shape of each protocol."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from gym_rm.errors import GymRMError
from gym_rm.scores import Scores

# Reasons with their status, as HTTP and the own routes have it.
_REASONS = """
400 invalid_json 400 bad_request 401 unauthorized 404 not_found 405 method_not_allowed 408 body_timeout
409 conflict 413 body_too_large 413 too_many_conversations 415 unsupported_media_type 421 wrong_host 422 invalid_request
422 failed_row 429 queue_full 500 scorer_error 501 not_supported 503 draining 503 deadline 503 memory
"""
STATUS = {reason: int(status) for status, reason in re.findall(r"(\d+) (\w+)", _REASONS)}
# vLLM, and SGLang like it, answer 400 to what is invalid.
VLLM_PATHS = re.compile(r"(/v\d)?/(classify|score|rerank|pooling|embeddings|tokenize)")
VLLM_TYPES = {401: "Authentication", 429: "TooManyRequests", 500: "InternalServer"}
VLLM_TYPES |= {501: "NotImplemented", 503: "ServiceUnavailable"}


class RequestError(HTTPException):
    """A request that gets no scores.

    Attributes:
        reason: key of `STATUS`; also the label in the metrics and the `code` of an error of the own routes.
        message: what was expected, what was sent and what to do.
        param: name of the invalid field, or None.
        retry_after: seconds after which the request may succeed, or None if it will not.
    """

    def __init__(self, reason: str, message: str, param: str | None = None, *, retry_after: int | None = None) -> None:
        super().__init__(STATUS[reason], message)
        self.reason, self.message, self.param, self.retry_after = reason, message, param, retry_after


def error_response(error: RequestError, path: str) -> Response:
    """Return a refused request in the shape of the protocol of a path."""
    status = 400 if VLLM_PATHS.fullmatch(path) and error.status_code == 422 else error.status_code
    message = error.message.encode("utf-8", "replace").decode()
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    content: dict[str, Any]
    if path == "/get_reward":
        content = {"error": message}
    elif VLLM_PATHS.fullmatch(path):
        kind = f"{VLLM_TYPES.get(status, 'BadRequest')}Error"
        content = {"error": {"message": message, "type": kind, "param": error.param, "code": status}}
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
        content = {"error": {"message": message, "type": kind, "code": error.reason}}
    return json_response(content, status, headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response, with escapes for everything but ASCII; NaN is an error."""
    body = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Response(body, status, headers, media_type="application/json")


@contextlib.contextmanager
def failed_rows() -> Iterator[None]:
    """Refuse the request of a trainer if a sample cannot be read or has no score."""
    try:
        yield
    except GymRMError as error:
        raise RequestError("failed_row", getattr(error, "summary", None) or str(error)) from error


def raise_for_rows(scores: Scores) -> Scores:
    """Return the scores; a protocol without errors of single rows refuses the request if one is missing."""
    if scores.failed_rows:
        row = scores.failed_rows[0]
        raise RequestError("failed_row", f"row {row}: {scores.errors[row]}", param=f"row {row}")
    return scores


def sigmoid(x: float) -> float:
    """Return 1 / (1 + exp(-x))."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
