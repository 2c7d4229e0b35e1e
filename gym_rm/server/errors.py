"""Refused requests, and the shape of an error in each protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Protocol: TypeAlias = Literal["native", "vllm", "sglang", "openai", "tei", "openrlhf"]

# Status of each reason, as HTTP and the own routes have it.
STATUS: dict[str, int] = {
    "invalid_json": 400,
    "bad_request": 400,
    "unauthorized": 401,
    "not_found": 404,
    "method_not_allowed": 405,
    "body_timeout": 408,
    "body_too_large": 413,
    "wrong_host": 421,
    "unsupported_media_type": 415,
    "invalid_request": 422,
    "unknown_field": 422,
    "empty_request": 422,
    "too_many_conversations": 413,
    "too_many_tokens": 422,
    "failed_row": 422,
    "queue_full": 429,
    "scorer_error": 500,
    "not_supported": 501,
    "loading": 503,
    "draining": 503,
    "deadline": 503,
    "memory": 503,
}

# Reasons to which a protocol gives another status.
OTHER_STATUS: dict[Protocol, dict[str, int]] = {
    "vllm": dict.fromkeys(
        ("invalid_request", "empty_request", "failed_row", "too_many_tokens", "unsupported_media_type"), 400
    ),
    "sglang": dict.fromkeys(("invalid_request", "empty_request", "failed_row", "too_many_tokens"), 400),
    "openai": dict.fromkeys(("invalid_request", "empty_request", "failed_row", "too_many_tokens"), 400),
    "tei": {"empty_request": 400, "scorer_error": 424},
    "openrlhf": {"invalid_json": 422},
}

VLLM_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    429: "TooManyRequestsError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
TEI_TYPES = {
    "scorer_error": "backend",
    "queue_full": "overloaded",
    "memory": "overloaded",
    "deadline": "overloaded",
    "empty_request": "empty",
    "failed_row": "tokenizer",
    "too_many_tokens": "tokenizer",
    "loading": "unhealthy",
    "draining": "unhealthy",
}


@dataclass
class Refused(Exception):
    """A request that gets no scores.

    Attributes:
        reason: key of `STATUS`; also the label in the metrics and the `code` of an error of the own routes.
        message: what was expected, what was sent and what to do.
        param: name of the invalid field, or None.
        retry_after: seconds after which the request may succeed, or None if it will not.
    """

    reason: str
    message: str
    param: str | None = None
    retry_after: int | None = None


def error_reply(refused: Refused, protocol: Protocol) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return the status, the body and the headers of a refused request in the shape of its protocol."""
    status = OTHER_STATUS.get(protocol, {}).get(refused.reason, STATUS[refused.reason])
    message = refused.message.encode("utf-8", "replace").decode()
    headers = {} if refused.retry_after is None else {"Retry-After": str(refused.retry_after)}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body: dict[str, Any]
    if protocol == "vllm":
        kind = VLLM_TYPES.get(status, "BadRequestError")
        body = {"error": {"message": message, "type": kind, "param": refused.param, "code": status}}
    elif protocol == "openai":  # of SGLang
        kind = VLLM_TYPES.get(status, "BadRequestError")
        body = {"object": "error", "message": message, "type": kind, "param": refused.param, "code": status}
    elif protocol == "sglang":
        body = {"error": {"message": message}}
    elif protocol == "tei":
        body = {"error": message, "error_type": TEI_TYPES.get(refused.reason, "validation")}
    elif protocol == "openrlhf":
        body = {"error": message}
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
        body = {"error": {"message": message, "type": kind, "code": refused.reason}}
    return status, body, headers


PROTOCOLS: dict[str, Protocol] = {
    "/classify": "vllm",
    "/score": "vllm",
    "/v1/score": "vllm",
    "/rerank": "vllm",
    "/v1/rerank": "vllm",
    "/v2/rerank": "vllm",
    "/pooling": "vllm",
    "/v1/embeddings": "openai",
    "/predict": "tei",
    "/get_reward": "openrlhf",
}


def protocol_of(path: str, body: Any = None) -> Protocol:
    """Return the protocol of a path; on a path that two protocols share, the fields of the body decide."""
    if isinstance(body, Mapping):
        if path == "/rerank" and "texts" in body and "documents" not in body:
            return "tei"
        if path == "/classify" and not body.keys() & {"input", "messages"} and body.keys() & {"text", "input_ids"}:
            return "sglang"
    return PROTOCOLS.get(path, "native")


def dump(content: Any) -> bytes:
    """Return JSON with escapes for everything but ASCII, so that lone surrogates can be sent too."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
