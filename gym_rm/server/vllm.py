"""vLLM's pooling routes: `/classify`, `/score`, `/rerank` and `/pooling`, in the shapes of vLLM 0.33.

The value of a text is its reward through a sigmoid, or the reward itself with `use_activation=false`. Reward models
with several heads have one value per head, as vLLM has one per label: through a softmax, or plain.
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from gym_rm.scores import Scores
from gym_rm.server.errors import Refused, protocol_of
from gym_rm.server.reading import Body, read_json, validate
from gym_rm.server.replies import body_of, raise_for_rows, reply, sigmoid
from gym_rm.server.service import Service
from gym_rm.server.sglang import SglangClassifyBody, sglang_classify
from gym_rm.server.tei import TeiRerankBody, tei_rerank
from gym_rm.server.texts import PairText, TextInput, pair_conversation, rendered_items


class CommonBody(Body):
    """Fields of all routes; those without effect on a reward are accepted and not used."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, pydantic.Field(ge=-1)] | None = None
    padding: Literal["max_length", "do_not_pad"] | None = None
    truncation_side: Literal["left", "right"] | None = None
    request_id: str = pydantic.Field(default_factory=lambda: uuid.uuid4().hex, max_length=512)
    priority: int = pydantic.Field(default=0, ge=-(2**63), le=2**63 - 1)
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, pydantic.Field(min_length=1, max_length=1024)] | None = None
    use_activation: bool | None = None


class TextBody(CommonBody):
    """Body of `/classify` with rendered texts."""

    input: TextInput
    add_special_tokens: bool = True


class ChatBody(CommonBody):
    """Body of `/classify` with one conversation."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


class _Encoding(Body):
    task: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] = "float32"
    endianness: Literal["native", "little", "big"] = "native"


class PoolingTextBody(TextBody, _Encoding):
    """Body of `/pooling` with rendered texts."""


class PoolingChatBody(ChatBody, _Encoding):
    """Body of `/pooling` with one conversation."""


class PairsBody(CommonBody):
    """Fields of `/score` and `/rerank`."""

    max_tokens_per_query: int = 0
    max_tokens_per_doc: int = 0
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class QueriesDocumentsBody(PairsBody):
    """Body of `/score` with queries and documents."""

    queries: PairText | list[PairText]
    documents: PairText | list[PairText]


class QueriesItemsBody(PairsBody):
    """Body of `/score` with queries and items."""

    queries: PairText | list[PairText]
    items: PairText | list[PairText]


class DataBody(PairsBody):
    """Body of `/score` with data_1 and data_2."""

    data_1: PairText | list[PairText]
    data_2: PairText | list[PairText]


class TextsBody(PairsBody):
    """Body of `/score` with text_1 and text_2."""

    text_1: PairText | list[PairText]
    text_2: PairText | list[PairText]


class RerankBody(PairsBody):
    """Body of `/rerank`."""

    query: PairText
    documents: PairText | list[PairText]
    top_n: int = pydantic.Field(default=0, ge=0)


SCORE_BODIES: dict[tuple[str, str], type[PairsBody]] = {
    ("queries", "documents"): QueriesDocumentsBody,
    ("queries", "items"): QueriesItemsBody,
    ("data_1", "data_2"): DataBody,
    ("text_1", "text_2"): TextsBody,
}
# Fields that would change the text that the model reads, each with the only value that is supported.
FIXED: dict[str, Any] = {
    "add_generation_prompt": False,
    "continue_final_message": False,
    "chat_template": None,
    "chat_template_kwargs": None,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "instruction": None,
    "max_tokens_per_query": 0,
    "max_tokens_per_doc": 0,
    "priority": 0,
    "dimensions": None,
}
DTYPES = {"float32": "f4", "float16": "f2"}
ORDERS = {"native": "=", "little": "<", "big": ">"}


def add_vllm_routes(app: FastAPI, service: Service) -> None:
    """Add vLLM's routes to an application."""

    @app.post("/classify", openapi_extra=body_of(TextBody, ChatBody, SglangClassifyBody))
    async def classify(request: Request) -> Response:
        """Values of texts or of one conversation (vLLM), or rewards of texts (SGLang)."""
        body = await read_json(request)
        if protocol_of("/classify", body) == "sglang":
            return await sglang_classify(service, body, request)
        model: type[TextBody | ChatBody] = ChatBody if _is_chat(body) else TextBody
        read = validate(model, _removed(body), request)
        scores = await _score_inputs(service, read, request)
        data = []
        for row in range(len(scores)):
            labels, values = _values(service, scores, row, read.use_activation)
            best = int(np.argmax(values))
            data.append({"index": row, "label": labels[best], "probs": values, "num_classes": len(values)})
        return reply({**_head(service, f"classify-{read.request_id}"), "data": data, "usage": _usage(scores)})

    @app.post("/score", openapi_extra=body_of(*SCORE_BODIES.values()))
    @app.post("/v1/score", openapi_extra=body_of(*SCORE_BODIES.values()))
    async def score(request: Request) -> Response:
        """Values of pairs of texts: one with each of several, or one by one."""
        body = await read_json(request)
        names = next((pair for pair in SCORE_BODIES if body.keys() >= set(pair)), ("queries", "documents"))
        read = validate(SCORE_BODIES[names], body, request)
        first, second = (_listed(getattr(read, name)) for name in names)
        if len(first) > 1 and len(first) != len(second):
            raise Refused("invalid_request", "Input lengths must be either 1:1, 1:N or N:N", param=names[0])
        scores = await _score_pairs(service, read, first, second, request)
        data = [
            {"index": row, "object": "score", "score": _single(scores, row, read.use_activation)}
            for row in range(len(scores))
        ]
        return reply({**_head(service, f"score-{read.request_id}"), "data": data, "usage": _usage(scores)})

    @app.post("/rerank", openapi_extra=body_of(RerankBody, TeiRerankBody))
    @app.post("/v1/rerank", openapi_extra=body_of(RerankBody))
    @app.post("/v2/rerank", openapi_extra=body_of(RerankBody))
    async def rerank(request: Request) -> Response:
        """Documents in the order of their values with a query (vLLM, or TEI with `texts`)."""
        body = await read_json(request)
        if protocol_of(request.url.path, body) == "tei":
            return await tei_rerank(service, body, request)
        read = validate(RerankBody, body, request)
        documents = _listed(read.documents)
        scores = await _score_pairs(service, read, [read.query], documents, request)
        results: list[dict[str, Any]] = [
            {"index": row, "document": _document(each), "relevance_score": _single(scores, row, read.use_activation)}
            for row, each in enumerate(documents)
        ]
        results.sort(key=lambda result: -result["relevance_score"])
        usage = {name: _usage(scores)[name] for name in ("prompt_tokens", "total_tokens")}
        head = {"id": f"score-{read.request_id}", "model": service.model, "usage": usage}
        return reply({**head, "results": results[: read.top_n or len(results)]})

    @app.post("/pooling", openapi_extra=body_of(PoolingTextBody, PoolingChatBody))
    async def pooling(request: Request) -> Response:
        """Values of texts or of one conversation, as numbers or as bytes."""
        body = await read_json(request)
        model: type[PoolingTextBody | PoolingChatBody] = PoolingChatBody if _is_chat(body) else PoolingTextBody
        read = validate(model, _removed(body), request)
        if read.task not in (None, "classify"):
            raise Refused(
                "invalid_request", f"Unsupported task: {read.task[:40]!r}; a reward model has 'classify'.", "task"
            )
        if read.embed_dtype not in DTYPES:
            raise Refused("invalid_request", f"embed_dtype must be one of {sorted(DTYPES)}.", param="embed_dtype")
        scores = await _score_inputs(service, read, request)
        values = [_values(service, scores, row, read.use_activation)[1] for row in range(len(scores))]
        head, usage = _head(service, f"pooling-{read.request_id}"), _usage(scores)
        dtype = ORDERS[read.endianness] + DTYPES[read.embed_dtype]
        if read.encoding_format.startswith("bytes"):
            return _bytes_reply(head, usage, values, read, dtype)
        data = [
            {"index": row, "object": "pooling", "data": each if read.encoding_format == "float" else _text(each, dtype)}
            for row, each in enumerate(values)
        ]
        return reply({**head, "data": data, "usage": usage})


def _is_chat(body: Mapping[str, Any]) -> bool:
    return "messages" in body and "input" not in body


def _removed(body: Mapping[str, Any]) -> Mapping[str, Any]:
    if "normalize" in body:
        raise Refused(
            "invalid_request", "Parameter `normalize` was removed; use `use_activation` instead.", param="normalize"
        )
    return body


def _check_fixed(read: CommonBody) -> None:
    """Refuse settings that would change the text, because it is the one the model was trained on."""
    for name, only in FIXED.items():
        given = getattr(read, name, only)
        if given != only and given not in ({}, ""):
            raise Refused(
                "invalid_request",
                f"{name} is not supported; leave it out. How a conversation is written is set when the server starts.",
                param=name,
            )


async def _score_inputs(service: Service, read: TextBody | ChatBody, request: Request) -> Scores:
    _check_fixed(read)
    if isinstance(read, ChatBody):
        if read.truncate_prompt_tokens is not None or read.add_special_tokens:
            name = "truncate_prompt_tokens" if read.truncate_prompt_tokens is not None else "add_special_tokens"
            raise Refused("invalid_request", f"{name} is not supported for messages; leave it out.", param=name)
        return raise_for_rows(await service.score([read.messages], request))
    truncate = read.truncate_prompt_tokens
    if truncate == 0:
        raise Refused("invalid_request", "truncate_prompt_tokens=0 leaves no tokens.", param="truncate_prompt_tokens")
    items = rendered_items(
        service,
        read.input,
        add_special_tokens=read.add_special_tokens,
        truncate=truncate,
        side=read.truncation_side or "right",
    )
    return raise_for_rows(await service.score(items, request))


async def _score_pairs(
    service: Service, read: PairsBody, first: Sequence[PairText], second: Sequence[PairText], request: Request
) -> Scores:
    _check_fixed(read)
    if read.truncate_prompt_tokens is not None:
        raise Refused(
            "invalid_request",
            "truncate_prompt_tokens is not supported for pairs; start the server with --option overlong=truncate_left.",
            param="truncate_prompt_tokens",
        )
    if not first or not second:
        raise Refused("empty_request", "At least one text and one text of its pair must be given")
    ones = list(first) * len(second) if len(first) == 1 else first
    pairs = [pair_conversation(one, other) for one, other in zip(ones, second, strict=True)]
    return raise_for_rows(await service.score(pairs, request))


def _listed(value: PairText | list[PairText]) -> list[PairText]:
    return value if isinstance(value, list) else [value]


def _document(value: PairText) -> dict[str, Any]:
    if isinstance(value, str):
        return {"text": value, "multi_modal": None}
    return {"text": None, "multi_modal": value.get("content", [])}


def _single(scores: Scores, row: int, use_activation: bool | None) -> float:
    reward = float(scores.rewards[row])
    return reward if use_activation is False else sigmoid(reward)


def _values(service: Service, scores: Scores, row: int, use_activation: bool | None) -> tuple[list[str], list[float]]:
    """Return the labels and their values: one, or one per head of a reward model with several heads."""
    kind = getattr(getattr(service.scorer, "kind", None), "name", None)
    if kind != "multi_head" or len(scores.components) < 2:
        return ["LABEL_0"], [_single(scores, row, use_activation)]
    values = np.array([each[row] for each in scores.components.values()])
    if use_activation is not False:
        values = np.exp(values - values.max())
        values /= values.sum()
    return list(scores.components), values.tolist()


def _head(service: Service, request_id: str) -> dict[str, Any]:
    return {"id": request_id, "object": "list", "created": int(time.time()), "model": service.model}


def _usage(scores: Scores) -> dict[str, Any]:
    tokens = int(scores.num_tokens.sum())
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    return {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, **details}


def _text(values: Sequence[float], dtype: str) -> str:
    return base64.b64encode(np.array(values, dtype=dtype).tobytes()).decode()


def _bytes_reply(
    head: dict[str, Any], usage: dict[str, Any], values: list[list[float]], read: _Encoding, dtype: str
) -> Response:
    """Return the values as bytes, with their places in the header `metadata` unless `bytes_only` was asked for."""
    parts = [np.array(each, dtype=dtype).tobytes() for each in values]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    data = [
        {"index": row, "embed_dtype": read.embed_dtype, "endianness": read.endianness, "start": end - len(part),
         "end": end, "shape": [len(each)]}
        for row, (part, end, each) in enumerate(zip(parts, ends, values, strict=True))
    ]  # fmt: skip
    metadata = {name: head[name] for name in ("id", "created", "model")}
    counts = {name: usage[name] for name in ("prompt_tokens", "total_tokens")}
    headers = {"metadata": json.dumps({**metadata, "data": data, "usage": counts})}
    content = b"".join(parts)
    return Response(
        content, 200, headers if read.encoding_format == "bytes" else {}, media_type="application/octet-stream"
    )
