"""vLLM's pooling routes: `/classify`, `/score` and `/pooling`, in the shapes of vLLM 0.33.

The value of a text is its reward through a sigmoid, or the reward itself with `use_activation=false`. Fields that
would change or cut the text, because it is the one the model was trained on, are unknown or accept only their default.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import pydantic
from fastapi import Body
from starlette.requests import Request
from starlette.responses import Response

from gym_rm.scores import Scores
from gym_rm.server import sglang
from gym_rm.server.mixed_scorer import AnyMessages
from gym_rm.server.request_bodies import Objects, RequestBody, TextInput, Texts
from gym_rm.server.responses import RequestError, json_response, raise_for_rows, sigmoid
from gym_rm.server.service import Service

STARTED = int(time.time())


class VLLMBody(RequestBody):
    """Fields of all routes; `model`, `user` and `priority` have no effect on a reward."""

    model: str | None = None
    user: str | None = None
    priority: int = 0
    request_id: str = pydantic.Field(default_factory=lambda: uuid.uuid4().hex, max_length=512)
    use_activation: bool | None = None


class InputBody(VLLMBody):
    """Body of `/classify` and `/pooling`: rendered texts, or one conversation."""

    input: TextInput | None = None
    messages: Objects | None = None
    add_special_tokens: bool = True
    add_generation_prompt: Literal[False] = False
    continue_final_message: Literal[False] = False
    task: Literal["classify"] | None = None
    encoding_format: Literal["float", "base64"] = "float"

    @pydantic.model_validator(mode="after")
    def _require_one_input(self) -> InputBody:
        if (self.input is None) == (self.messages is None):
            raise ValueError("either input or messages must be given")
        return self


class ScoreBody(VLLMBody):
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


def _form(body: Any) -> str:
    """Return whose body of `/classify` this is; the names are those of the tags below."""
    names = body.keys() if isinstance(body, dict) else set()
    return "body of SGLang" if names & {"text", "input_ids"} and not names & {"input", "messages"} else "body of vLLM"


ClassifyBody = Annotated[
    Annotated[InputBody, pydantic.Tag("body of vLLM")]
    | Annotated[sglang.SGLangClassifyBody, pydantic.Tag("body of SGLang")],
    pydantic.Discriminator(_form),
    Body(),
]


async def models(request: Request) -> Response:
    """The only model."""
    model = request.app.state.service.model
    entry = {"id": model, "object": "model", "created": STARTED, "owned_by": "gym_rm", "root": model, "parent": None}
    return json_response({"object": "list", "data": [entry]})


async def classify(body: ClassifyBody, request: Request) -> Response:
    """Values of texts or of one conversation (vLLM), or rewards of texts (SGLang)."""
    if isinstance(body, sglang.SGLangClassifyBody):
        return await sglang.classify(body, request)
    service: Service = request.app.state.service
    scores = await _score_inputs(service, body, request)
    return _reply(
        service, "classify", body, scores, lambda value: {"label": "LABEL_0", "probs": [value], "num_classes": 1}
    )


async def score(body: ScoreBody, request: Request) -> Response:
    """Values of pairs of texts: one with each of several, or one by one."""
    service: Service = request.app.state.service
    first, second = ([value] if isinstance(value, str) else value for value in (body.queries, body.documents))
    if len(first) not in (1, len(second)):
        raise RequestError("invalid_request", "Input lengths must be either 1:1, 1:N or N:N")
    scores = await _score_pairs(service, first * len(second) if len(first) == 1 else first, second, request)
    return _reply(service, "score", body, scores, lambda value: {"object": "score", "score": value})


async def pooling(body: InputBody, request: Request) -> Response:
    """Values of texts or of one conversation, as numbers or base64."""
    service: Service = request.app.state.service
    scores = await _score_inputs(service, body, request)
    encoding = body.encoding_format
    return _reply(
        service, "pooling", body, scores, lambda value: {"object": "pooling", "data": sglang.encode([value], encoding)}
    )


async def _score_inputs(service: Service, body: InputBody, request: Request) -> Scores:
    if body.input is None:
        return raise_for_rows(await service.score([AnyMessages(body.messages)], request))
    texts = service.rendered_texts(body.input, add_special_tokens=body.add_special_tokens)
    return raise_for_rows(await service.score(texts, request))


async def _score_pairs(service: Service, first: Sequence[str], second: Sequence[str], request: Request) -> Scores:
    """Return the scores of pairs: conversations of a user message and the reply to it."""
    if not first or not second:
        raise RequestError("invalid_request", "At least one text and one text of its pair must be given")
    conversations = [
        [{"role": "user", "content": one}, {"role": "assistant", "content": other}]
        for one, other in zip(first, second, strict=True)
    ]
    return raise_for_rows(await service.score(conversations, request))


def _reply(
    service: Service, route: str, body: VLLMBody, scores: Scores, entry: Callable[[float], dict[str, Any]]
) -> Response:
    """Return an entry for each value, with what vLLM writes around them."""
    values = [reward if body.use_activation is False else sigmoid(reward) for reward in scores.rewards.tolist()]
    data = [{"index": row, **entry(value)} for row, value in enumerate(values)]
    head = {"id": f"{route}-{body.request_id}", "object": "list", "created": int(time.time())}
    return json_response({**head, "model": service.model_of(scores), "data": data, "usage": sglang.usage(scores)})
