"""SGLang's routes for reward models: `/classify` with `text`, and `/v1/embeddings`, which verl calls. Plain rewards."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pydantic
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from gym_rm.server.door import Item
from gym_rm.server.errors import Refused
from gym_rm.server.reading import Body, read_json, validate
from gym_rm.server.replies import body_of, raise_for_rows, reply
from gym_rm.server.service import Service
from gym_rm.server.texts import TextInput, TokenId, is_single, pair_conversation, rendered_items


class SglangClassifyBody(Body):
    """Body of SGLang's `/classify`: texts or token ids; pairs of texts with `is_cross_encoder_request`."""

    text: str | list[str] | list[list[str]] | None = None
    input_ids: list[TokenId] | list[list[TokenId]] | None = None
    rid: str | list[str] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    is_cross_encoder_request: bool = False


class EmbeddingsBody(Body):
    """Body of `/v1/embeddings`."""

    input: TextInput
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None
    rid: str | list[str] | None = None
    priority: int | None = pydantic.Field(default=None, ge=-(2**63), le=2**63 - 1)


def add_sglang_routes(app: FastAPI, service: Service) -> None:
    """Add SGLang's routes to an application."""

    @app.put("/classify", openapi_extra=body_of(SglangClassifyBody))
    async def classify(request: Request) -> Response:
        """Rewards of texts."""
        return await sglang_classify(service, await read_json(request), request)

    @app.post("/v1/embeddings", openapi_extra=body_of(EmbeddingsBody))
    async def embeddings(request: Request) -> Response:
        """Rewards of texts, each as an embedding of one number."""
        read = validate(EmbeddingsBody, await read_json(request), request)
        if read.dimensions not in (None, 1):
            raise Refused("invalid_request", "dimensions must be 1: a reward is one number.", param="dimensions")
        scores = raise_for_rows(await service.score(rendered_items(service, read.input), request))
        data = [
            {"object": "embedding", "index": row, "embedding": _encoded(reward, read.encoding_format)}
            for row, reward in enumerate(scores.rewards.tolist())
        ]
        tokens = int(scores.num_tokens.sum())
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
        return reply({"object": "list", "data": data, "model": service.model, "usage": usage})


async def sglang_classify(service: Service, body: Mapping[str, Any], request: Request) -> Response:
    """Answer SGLang's `/classify`: an object for one text, a list for a list."""
    start = time.perf_counter()
    read = validate(SglangClassifyBody, body, request)
    if (read.text is None) == (read.input_ids is None):
        raise Refused("invalid_request", "Either text or input_ids should be provided.", param="text")
    value: Any = read.text if read.text is not None else read.input_ids
    items, single = _items(service, read, value)
    scores = raise_for_rows(await service.score(items, request))
    names = read.rid if isinstance(read.rid, list) else [read.rid] if single and read.rid else []
    seconds = time.perf_counter() - start
    replies = [
        {
            "embedding": [reward],
            "meta_info": {
                "id": names[row] if row < len(names) else uuid.uuid4().hex,
                "finish_reason": {"type": "length", "length": 0},
                "prompt_tokens": int(scores.num_tokens[row]),
                "e2e_latency": seconds,
            },
        }
        for row, reward in enumerate(scores.rewards.tolist())
    ]
    return reply(replies[0] if single else replies)


def _items(service: Service, read: SglangClassifyBody, value: Any) -> tuple[list[Item], bool]:
    pairs = isinstance(value, list) and bool(value) and isinstance(value[0], list) and read.text is not None
    if not pairs:
        return list(rendered_items(service, value)), is_single(value)
    if not read.is_cross_encoder_request or any(len(pair) != 2 for pair in value):
        raise Refused(
            "invalid_request",
            "a list in text must be a pair, with is_cross_encoder_request=true.",
            param="text",
        )
    return [pair_conversation(*pair) for pair in value], False


def _encoded(reward: float, encoding_format: str) -> list[float] | str:
    if encoding_format == "float":
        return [reward]
    return base64.b64encode(np.array([reward], dtype="<f4").tobytes()).decode()
