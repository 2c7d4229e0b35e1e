"""SGLang's routes for reward models: `/classify` with `text`, and `/v1/embeddings`, which verl calls. Plain rewards."""

from __future__ import annotations

import base64
import time
import uuid
from typing import Any, Literal

import numpy as np
import pydantic
from starlette.requests import Request
from starlette.responses import Response

from gym_rm.scores import Scores
from gym_rm.server.request_bodies import Objects, RequestBody, TextInput, Texts, TokenIds, TokenLists
from gym_rm.server.responses import json_response, raise_for_rows
from gym_rm.server.service import Service


class SGLangClassifyBody(RequestBody):
    """Body of SGLang's `/classify`: texts or token ids."""

    text: str | Texts | None = None
    input_ids: TokenIds | TokenLists | None = None
    rid: str | Texts | None = None
    sampling_params: dict[str, Any] | Objects | None = None
    model: str | None = None

    @pydantic.model_validator(mode="after")
    def _require_one_input(self) -> SGLangClassifyBody:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("Either text or input_ids should be provided")
        return self


class EmbeddingsBody(RequestBody):
    """Body of `/v1/embeddings`; a reward is an embedding of one number."""

    input: TextInput
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Literal[1] | None = None
    user: str | None = None


async def classify(body: SGLangClassifyBody, request: Request) -> Response:
    """Rewards of texts: an object for one text, a list for a list."""
    start = time.perf_counter()
    service: Service = request.app.state.service
    texts = body.text if body.text is not None else body.input_ids
    assert texts is not None
    scores = raise_for_rows(await service.score(service.rendered_texts(texts), request))
    single = isinstance(texts, str) or isinstance(texts[0], int)
    ids = [body.rid] if isinstance(body.rid, str) else body.rid or []
    replies = [
        {
            "embedding": [reward],
            "meta_info": {
                "id": ids[row] if row < len(ids) else uuid.uuid4().hex,
                "finish_reason": {"type": "length", "length": 0},
                "prompt_tokens": int(scores.num_tokens[row]),
                "e2e_latency": time.perf_counter() - start,
            },
        }
        for row, reward in enumerate(scores.rewards.tolist())
    ]
    return json_response(replies[0] if single else replies)


async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    """Rewards of texts, each as an embedding of one number."""
    service: Service = request.app.state.service
    scores = raise_for_rows(await service.score(service.rendered_texts(body.input), request))
    data = [
        {"object": "embedding", "index": row, "embedding": encode([reward], body.encoding_format)}
        for row, reward in enumerate(scores.rewards.tolist())
    ]
    return json_response({"object": "list", "data": data, "model": service.model_of(scores), "usage": usage(scores)})


def usage(scores: Scores) -> dict[str, int]:
    """Return the numbers of tokens of a request, as OpenAI's routes name them."""
    tokens = int(scores.num_tokens.sum())
    return {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}


def encode(values: list[float], encoding_format: str) -> list[float] | str:
    """Return numbers as they are, or as base64 of float32 (little-endian)."""
    if encoding_format == "float":
        return values
    return base64.b64encode(np.array(values, dtype="<f4").tobytes()).decode()
