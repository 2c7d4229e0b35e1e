"""The routes of vLLM 0.32 and SGLang 0.5 for reward models: values of texts, conversations and pairs, and tokens.

vLLM's value of a text is its reward through a sigmoid, or the reward itself with `use_activation=false`; SGLang's is
the reward. A field that would change or cut the text accepts only the value that does not.
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import AfterValidator, AliasChoices, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from gym_rm.engine.text.messages import check_conversation, check_text, part_text
from gym_rm.scores import Scores
from gym_rm.server.request_bodies import NoFields, Objects, RequestBody, TextInput, Texts, TokenIds, TokenLists
from gym_rm.server.responses import RequestError, failed_rows, json_response, raise_for_rows, sigmoid
from gym_rm.server.service import Service

STARTED = int(time.time())
INPUTS = ("messages", "prompt", "input", "text", "input_ids")  # fields of which a body has one


def _joined_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the text parts of a message as vLLM does: by line breaks."""
    for message in messages:
        parts = message.get("content")
        if isinstance(parts, list) and all(isinstance(each, dict) and each.get("type") == "text" for each in parts):
            message["content"] = "\n".join(part_text(each) for each in parts)
    return messages


Messages: TypeAlias = Annotated[Objects, AfterValidator(_joined_parts)]


class PoolingBody(RequestBody):
    """Body of all routes: fields that have no effect on a reward, or that may only have the value that has none."""

    model: str | None = None
    user: str | None = None
    priority: int = 0
    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex, max_length=512)
    use_activation: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    truncate_prompt_tokens: Literal[-1] | None = None  # in vLLM to the model's length; here a longer text is an error
    truncation_side: Literal["left", "right"] | None = None
    padding: Literal["do_not_pad"] | None = None
    max_tokens_per_query: Literal[0] = 0
    max_tokens_per_doc: Literal[0] = 0
    embed_dtype: Literal["float32"] = "float32"
    endianness: Literal["native", "little"] = "native"
    dimensions: Literal[1] | None = None
    add_special_tokens: bool = True
    continue_final_message: Literal[False] = False
    chat_template: None = None
    chat_template_kwargs: NoFields = None
    instruction: None = None
    tools: Annotated[Objects, Field(max_length=0)] | None = None
    media_io_kwargs: NoFields = None
    mm_processor_kwargs: NoFields = None

    @model_validator(mode="after")
    def _require_one_input(self) -> PoolingBody:
        names = [name for name in INPUTS if name in type(self).model_fields]
        if names and sum(getattr(self, name) is not None for name in names) != 1:
            raise ValueError(f"one of {', '.join(names)} must be given")
        return self

    def values_of(self, scores: Scores) -> list[float]:
        """Return rewards, through a sigmoid unless the caller wants them as they are."""
        return [reward if self.use_activation is False else sigmoid(reward) for reward in scores.rewards.tolist()]


class InputBody(PoolingBody):
    """Body of `/pooling` and `/v1/embeddings`: rendered texts or token ids, or one conversation."""

    input: TextInput | None = None
    messages: Messages | None = None
    add_generation_prompt: Literal[False] = False
    task: Literal["classify"] | None = None
    encoding_format: Literal["float", "base64"] = "float"


class ClassifyBody(InputBody):
    """Body of `/classify`; `text` or `input_ids` ask for a reply of SGLang's."""

    text: str | Texts | None = None
    input_ids: TokenIds | TokenLists | None = None
    rid: str | Texts | None = None
    sampling_params: dict[str, Any] | Objects | None = None


class ScoreBody(PoolingBody):
    """Body of `/score`, whose two fields have several names."""

    queries: str | Texts = Field(validation_alias=AliasChoices("queries", "data_1", "text_1"))
    documents: str | Texts = Field(validation_alias=AliasChoices("documents", "items", "data_2", "text_2"))


class RerankBody(PoolingBody):
    """Body of `/rerank`; `top_n=0` asks for all documents."""

    query: str
    documents: str | Texts
    top_n: int = Field(default=0, ge=0)
    return_documents: bool | None = None  # of Jina and Cohere; vLLM always returns them


class TokenizeBody(PoolingBody):
    """Body of `/tokenize`: a rendered text, or one conversation."""

    prompt: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


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
    scores, encoding = await _score(request, body), body.encoding_format
    return _reply(request, body, scores, lambda value: {"object": "pooling", "data": _encoded(value, encoding)})


async def score(body: ScoreBody, request: Request) -> Response:
    """Values of pairs of texts: one with each of several, or one by one."""
    scores = await _score_pairs(request, body.queries, body.documents)
    return _reply(request, body, scores, lambda value: {"object": "score", "score": value})


async def rerank(body: RerankBody, request: Request) -> Response:
    """The best documents, by the value of the query and the document as a pair."""
    texts = [body.documents] if isinstance(body.documents, str) else body.documents
    scores = await _score_pairs(request, body.query, texts)
    results = [
        {"index": row, "document": {"text": texts[row], "multi_modal": None}, "relevance_score": value}
        for row, value in sorted(enumerate(body.values_of(scores)), key=lambda each: each[1], reverse=True)
    ]
    head = {"id": f"score-{body.request_id}", "model": request.app.state.service.model_of(scores)}
    return json_response({**head, "usage": _usage(scores), "results": results[: body.top_n or None]})


async def embeddings(body: InputBody, request: Request) -> Response:
    """Rewards of texts, each as an embedding of one number."""
    scores, encoding = await _score(request, body), body.encoding_format
    plain = body.model_copy(update={"use_activation": False})
    return _reply(request, plain, scores, lambda v: {"object": "embedding", "embedding": _encoded(v, encoding)})


async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Token ids of a rendered text, or of a conversation, in which control tokens of messages stay text."""
    service: Service = request.app.state.service
    if (renderer := service.mixed.renderer) is None:
        raise RequestError("not_supported", f"the scorer of {service.model!r} has no tokenizer; send it texts.")

    def token_ids() -> np.typing.NDArray[np.int32]:
        if body.prompt is not None:
            check_text(body.prompt, "the prompt")
            renderer.refuse_long(body.prompt)
            return renderer.tokenize([body.prompt], body.add_special_tokens)[0]
        messages = check_conversation(body.messages)
        return renderer.message_ids(messages, add_generation_prompt=body.add_generation_prompt)

    with failed_rows():
        ids = (await asyncio.to_thread(token_ids)).tolist()
    texts = renderer.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    return json_response({"count": len(ids), "max_model_len": renderer.max_length, "tokens": ids, "token_strs": texts})


async def _score(request: Request, body: InputBody) -> Scores:
    service: Service = request.app.state.service
    if body.messages is not None:
        return raise_for_rows(await service.score([body.messages], request, sort="messages"))
    texts = next(value for name in INPUTS if (value := getattr(body, name, None)) is not None)
    return raise_for_rows(await service.score_texts(texts, request, add_special_tokens=body.add_special_tokens))


async def _score_pairs(request: Request, first: str | Texts, second: str | Texts) -> Scores:
    """Score pairs of texts; a scorer that reads no texts gets conversations of a user message and the reply to it."""
    first, second = ([value] if isinstance(value, str) else value for value in (first, second))
    if not second or len(first) not in (1, len(second)):
        raise RequestError("invalid_request", f"expected 1 text and N, or N and N; got {len(first)} and {len(second)}.")
    pairs = [*zip(first * len(second) if len(first) == 1 else first, second, strict=True)]
    service: Service = request.app.state.service
    if service.mixed.scores_texts:
        return raise_for_rows(await service.score_texts(pairs, request))
    conversations = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairs]
    return raise_for_rows(await service.score(conversations, request))


def _reply(request: Request, body: PoolingBody, scores: Scores, entry: Callable[[float], dict[str, Any]]) -> Response:
    """Return an entry for each value, with what vLLM writes around them."""
    data = [{"index": row, **entry(value)} for row, value in enumerate(body.values_of(scores))]
    route = request.url.path.rpartition("/")[2]
    head = {"id": f"{route}-{body.request_id}", "object": "list", "created": int(time.time())}
    model = request.app.state.service.model_of(scores)
    usage = {**_usage(scores), "completion_tokens": 0, "prompt_tokens_details": None, "completion_tokens_details": None}
    return json_response({**head, "model": model, "data": data, "usage": usage})


def _sglang_reply(body: ClassifyBody, scores: Scores, seconds: float) -> Response:
    """Return an object for one text, or a list for a list."""
    single = isinstance(body.text, str) or isinstance((body.input_ids or [[]])[0], int)
    given = [body.rid] if isinstance(body.rid, str) else body.rid or []
    ids = [*given, *(uuid.uuid4().hex for _ in scores.rewards)]
    meta = {"finish_reason": {"type": "length", "length": 0}, "e2e_latency": seconds}
    replies = [
        {"embedding": [reward], "meta_info": {"id": ids[row], "prompt_tokens": int(scores.num_tokens[row]), **meta}}
        for row, reward in enumerate(scores.rewards.tolist())
    ]
    return json_response(replies[0] if single else replies)


def _usage(scores: Scores) -> dict[str, int]:
    """Return the numbers of tokens of a request, as OpenAI's routes name them."""
    return dict.fromkeys(("prompt_tokens", "total_tokens"), int(scores.num_tokens.sum()))


def _encoded(value: float, encoding_format: str) -> list[float] | str:
    """Return a value as a list of one number, or as base64 of its float32 (little-endian)."""
    if encoding_format == "float":
        return [value]
    return base64.b64encode(np.array([value], dtype="<f4").tobytes()).decode()
