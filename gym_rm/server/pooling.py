"""The routes of vLLM 0.33 and SGLang 0.5 for reward models: `/classify`, `/score`, `/pooling` and `/v1/embeddings`.

vLLM's value of a text is its reward through a sigmoid, or the reward itself with `use_activation=false`; SGLang's is
the reward. Fields that would change or cut the text, because it is the one the model was trained on, are unknown or
accept only their default.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pydantic
from starlette.requests import Request
from starlette.responses import Response

from gym_rm.scores import Scores
from gym_rm.server.request_bodies import Objects, RequestBody, TextInput, Texts, TokenIds, TokenLists
from gym_rm.server.responses import RequestError, json_response, raise_for_rows, sigmoid
from gym_rm.server.service import Service

STARTED = int(time.time())


class PoolingBody(RequestBody):
    """Body of all routes of vLLM; `model`, `user` and `priority` have no effect on a reward."""

    model: str | None = None
    user: str | None = None
    priority: int = 0
    request_id: str = pydantic.Field(default_factory=lambda: uuid.uuid4().hex, max_length=512)
    use_activation: bool | None = None


class InputBody(PoolingBody):
    """Body of `/pooling`: rendered texts or token ids, or one conversation."""

    input: TextInput | None = None
    messages: Objects | None = None
    add_special_tokens: bool = True
    add_generation_prompt: Literal[False] = False
    continue_final_message: Literal[False] = False
    task: Literal["classify"] | None = None
    encoding_format: Literal["float", "base64"] = "float"

    @property
    def texts(self) -> TextInput | None:
        """Rendered texts or token ids."""
        return self.input

    @pydantic.model_validator(mode="after")
    def _require_one_input(self) -> InputBody:
        names = [name for name in ("input", "messages", "text", "input_ids") if name in type(self).model_fields]
        if sum(getattr(self, name) is not None for name in names) != 1:
            raise ValueError(f"one of {', '.join(names)} must be given")
        return self


class ClassifyBody(InputBody):
    """Body of `/classify`; `text` or `input_ids` ask for a reply of SGLang's."""

    text: str | Texts | None = None
    input_ids: TokenIds | TokenLists | None = None
    rid: str | Texts | None = None
    sampling_params: dict[str, Any] | Objects | None = None

    @property
    def texts(self) -> TextInput | None:
        """Rendered texts or token ids."""
        return next((value for value in (self.input, self.text, self.input_ids) if value is not None), None)


class ScoreBody(PoolingBody):
    """Body of `/score`; `text_1` and `text_2` are other names of `queries` and `documents`."""

    queries: str | Texts
    documents: str | Texts

    @pydantic.model_validator(mode="before")
    @classmethod
    def _rename_texts(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or fields.keys() & {"queries", "documents"}:
            return fields
        names = {"text_1": "queries", "text_2": "documents"}
        return {names.get(name, name): value for name, value in fields.items()}


class EmbeddingsBody(RequestBody):
    """Body of `/v1/embeddings`, which verl calls; a reward is an embedding of one number."""

    input: TextInput
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Literal[1] | None = None
    user: str | None = None


async def models(request: Request) -> Response:
    """The only model."""
    model = request.app.state.service.model
    entry = {"id": model, "object": "model", "created": STARTED, "owned_by": "gym_rm", "root": model, "parent": None}
    return json_response({"object": "list", "data": [entry]})


async def classify(body: ClassifyBody, request: Request) -> Response:
    """Values of texts or of one conversation (vLLM), or rewards of texts (SGLang)."""
    start = time.perf_counter()
    scores = await _score(request, body)
    if body.text is not None or body.input_ids is not None:
        return _sglang_reply(body, scores, time.perf_counter() - start)
    return _reply(request, body, scores, lambda value: {"label": "LABEL_0", "probs": [value], "num_classes": 1})


async def pooling(body: InputBody, request: Request) -> Response:
    """Values of texts or of one conversation, as numbers or base64."""
    scores = await _score(request, body)
    encoding = body.encoding_format
    return _reply(request, body, scores, lambda value: {"object": "pooling", "data": _encoded(value, encoding)})


async def score(body: ScoreBody, request: Request) -> Response:
    """Values of pairs of texts, a user message and the reply to it: one with each of several, or one by one."""
    first, second = ([value] if isinstance(value, str) else value for value in (body.queries, body.documents))
    if not first or not second:
        raise RequestError("invalid_request", "At least one text and one text of its pair must be given")
    if len(first) not in (1, len(second)):
        raise RequestError("invalid_request", "Input lengths must be either 1:1, 1:N or N:N")
    pairs = zip(first * len(second) if len(first) == 1 else first, second, strict=True)
    conversations = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairs]
    service: Service = request.app.state.service
    scores = raise_for_rows(await service.score(conversations, request))
    return _reply(request, body, scores, lambda value: {"object": "score", "score": value})


async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    """Rewards of texts, each as an embedding of one number."""
    service: Service = request.app.state.service
    scores = raise_for_rows(await service.score_texts(body.input, request))
    data = [
        {"object": "embedding", "index": row, "embedding": _encoded(reward, body.encoding_format)}
        for row, reward in enumerate(scores.rewards.tolist())
    ]
    return json_response({"object": "list", "data": data, "model": service.model_of(scores), "usage": _usage(scores)})


async def _score(request: Request, body: InputBody) -> Scores:
    service: Service = request.app.state.service
    if body.texts is None:
        return raise_for_rows(await service.score([body.messages], request, sort="messages"))
    special = body.add_special_tokens
    return raise_for_rows(await service.score_texts(body.texts, request, add_special_tokens=special))


def _reply(request: Request, body: PoolingBody, scores: Scores, entry: Callable[[float], dict[str, Any]]) -> Response:
    """Return an entry for each value, with what vLLM writes around them."""
    values = [reward if body.use_activation is False else sigmoid(reward) for reward in scores.rewards.tolist()]
    data = [{"index": row, **entry(value)} for row, value in enumerate(values)]
    route = request.url.path.rpartition("/")[2]
    head = {"id": f"{route}-{body.request_id}", "object": "list", "created": int(time.time())}
    model = request.app.state.service.model_of(scores)
    return json_response({**head, "model": model, "data": data, "usage": _usage(scores)})


def _sglang_reply(body: ClassifyBody, scores: Scores, seconds: float) -> Response:
    """Return an object for one text, or a list for a list."""
    texts = body.texts
    single = isinstance(texts, str) or (texts is not None and isinstance(texts[0], int))
    ids = [body.rid] if isinstance(body.rid, str) else body.rid or []
    replies = [
        {
            "embedding": [reward],
            "meta_info": {
                "id": ids[row] if row < len(ids) else uuid.uuid4().hex,
                "finish_reason": {"type": "length", "length": 0},
                "prompt_tokens": int(scores.num_tokens[row]),
                "e2e_latency": seconds,
            },
        }
        for row, reward in enumerate(scores.rewards.tolist())
    ]
    return json_response(replies[0] if single else replies)


def _usage(scores: Scores) -> dict[str, int]:
    """Return the numbers of tokens of a request, as OpenAI's routes name them."""
    tokens = int(scores.num_tokens.sum())
    return {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}


def _encoded(value: float, encoding_format: str) -> list[float] | str:
    """Return a value as a list of one number, or as base64 of its float32 (little-endian)."""
    if encoding_format == "float":
        return [value]
    return base64.b64encode(np.array([value], dtype="<f4").tobytes()).decode()
