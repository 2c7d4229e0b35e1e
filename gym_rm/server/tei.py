"""Text Embeddings Inference's routes: `/predict`, and `/rerank` with `texts`. Sigmoid, or rewards with `raw_scores`.

A flat list of two texts is one pair, not a batch. Unlike TEI, a text that is too long is cut only with
`truncate=true`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from gym_rm.server.door import Item
from gym_rm.server.errors import Refused
from gym_rm.server.reading import Body, read_json, validate
from gym_rm.server.replies import body_of, raise_for_rows, reply, sigmoid
from gym_rm.server.service import Service
from gym_rm.server.texts import pair_conversation, rendered_items


class PredictBody(Body):
    """Body of `/predict`: a text, a pair of texts, or a list of lists of one or two texts."""

    inputs: str | list[str] | list[list[str]]
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] = "right"
    raw_scores: bool = False


class TeiRerankBody(Body):
    """Body of TEI's `/rerank`."""

    query: str
    texts: list[str]
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] = "right"
    raw_scores: bool = False
    return_text: bool = False


def add_tei_routes(app: FastAPI, service: Service) -> None:
    """Add TEI's routes to an application; its `/rerank` is beside vLLM's."""

    @app.post("/predict", openapi_extra=body_of(PredictBody))
    async def predict(request: Request) -> Response:
        """Scores of a text, of a pair, or of a batch of both."""
        read = validate(PredictBody, await read_json(request), request)
        inputs = read.inputs
        batch = isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], list)
        sequences: list[Any] = list(inputs) if batch else [[inputs] if isinstance(inputs, str) else inputs]
        items = [_item(service, each, read) for each in sequences]
        scores = raise_for_rows(await service.score(items, request))
        predictions = [
            [{"score": _score(each, read.raw_scores), "label": "LABEL_0"}] for each in scores.rewards.tolist()
        ]
        return reply(predictions if batch else predictions[0])


async def tei_rerank(service: Service, body: Mapping[str, Any], request: Request) -> Response:
    """Answer TEI's `/rerank`: the texts in the order of their scores with the query."""
    read = validate(TeiRerankBody, body, request)
    if not read.texts:
        raise Refused("empty_request", "`texts` cannot be empty", param="texts")
    _check_pairs(read.truncate)
    items = [pair_conversation(read.query, text) for text in read.texts]
    scores = raise_for_rows(await service.score(items, request))
    ranks: list[dict[str, Any]] = [
        {"index": row, **({"text": text} if read.return_text else {}), "score": _score(reward, read.raw_scores)}
        for row, (text, reward) in enumerate(zip(read.texts, scores.rewards.tolist(), strict=True))
    ]
    ranks.sort(key=lambda rank: -rank["score"])
    return reply(ranks)


def _item(service: Service, texts: list[str], read: PredictBody) -> Item:
    if len(texts) not in (1, 2):
        raise Refused(
            "empty_request" if not texts else "invalid_request",
            f"inputs must be a text, a pair [text, text] or a batch [[text], [text, text], ...]; got {len(texts)} "
            "texts in a list.",
            param="inputs",
        )
    if len(texts) == 2:
        _check_pairs(read.truncate)
        return pair_conversation(*texts)
    side: Literal["left", "right"] = "left" if read.truncation_direction.lower() == "left" else "right"
    (item,) = rendered_items(service, texts[0], truncate=-1 if read.truncate else None, side=side)
    return item


def _check_pairs(truncate: bool | None) -> None:
    if truncate:
        raise Refused(
            "invalid_request",
            "truncate is not supported for pairs; start the server with --option overlong=truncate_left.",
            param="truncate",
        )


def _score(reward: float, raw: bool) -> float:
    return reward if raw else sigmoid(reward)
