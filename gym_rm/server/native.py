"""The own routes: rewards of conversations, information, health, metrics and new weights."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Annotated, Any, Literal

import pydantic
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from gym_rm.data.prompts import name_of
from gym_rm.data.tools import canonical_tools
from gym_rm.errors import GymRMError
from gym_rm.server import page as html_page
from gym_rm.server.mixed_scorer import Sort
from gym_rm.server.request_bodies import RequestBody
from gym_rm.server.responses import RequestError, json_response
from gym_rm.server.service import Service
from gym_rm.types import Message, Prompt


class PromptBody(RequestBody):
    """One entry of `prompts`."""

    id: str | None = None
    answer: str | None = None
    metadata: dict[str, Any] = pydantic.Field(default_factory=dict)
    tools: Annotated[Any, pydantic.AfterValidator(canonical_tools)] = ()

    def to_prompt(self, conversation: Any) -> Prompt:
        """Return the data row of a conversation."""
        messages: tuple[Message, ...] = tuple(conversation[:-1]) if isinstance(conversation, list) else ()
        name = self.id or name_of(messages)
        return Prompt(messages, name, answer=self.answer, metadata=self.metadata, tools=self.tools)


class RewardsBody(RequestBody):
    """Body of `POST /v1/rewards`."""

    conversations: list[Any]
    prompts: Annotated[list[PromptBody | None], pydantic.Field(fail_fast=True)] | None = None
    turns: Literal["last", "all"] = "last"

    @pydantic.model_validator(mode="after")
    def _require_a_prompt_each(self) -> RewardsBody:
        if self.prompts is not None and len(self.prompts) != len(self.conversations):
            raise ValueError(
                f"prompts must have one entry per conversation, got {len(self.prompts)} for {len(self.conversations)}"
            )
        return self


class WeightsBody(RequestBody):
    """Body of `POST /v1/weights`."""

    path: str = pydantic.Field(min_length=1)


async def rewards(body: RewardsBody, request: Request) -> Response:
    """Score conversations. A conversation without a score has an error, and the others keep their rewards."""
    service: Service = request.app.state.service
    prompts: list[Prompt | None] | None = None
    if body.prompts is not None:
        rows = zip(body.prompts, body.conversations, strict=True)
        prompts = [None if prompt is None else prompt.to_prompt(one) for prompt, one in rows]
    if body.turns == "all" and not service.mixed.scores_turns:
        raise RequestError("not_supported", f"the scorer of {service.model!r} cannot score all turns; omit turns.")
    sort: Sort = "turns" if body.turns == "all" else "reply"
    scores = await service.score(body.conversations, request, prompts, sort=sort)
    if body.turns == "last":
        scores = dataclasses.replace(scores, turn_rewards=None)
    return json_response({"model": service.model_of(scores), **scores.to_dict()})


async def weights(body: WeightsBody, request: Request) -> Response:
    """Load other weights between two batches."""
    service: Service = request.app.state.service
    if not service.options.allow_weight_updates:
        raise RequestError("not_supported", "weight updates are off; start the server with --allow-weight-updates.")
    try:
        return json_response(await asyncio.to_thread(service.update_weights, body.path))
    except (GymRMError, OSError) as error:
        raise RequestError("invalid_request", f"the weights are unchanged: {error}") from error


async def info(request: Request) -> Response:
    """Return the model, how it scores, the limits, and known conversations with their rewards."""
    service: Service = request.app.state.service
    return json_response({**service.description, "limits": service.limits.to_dict()})


async def health() -> Response:
    """The process lives."""
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """Status 200 if requests are accepted now, else 503."""
    state = request.app.state.service.state
    return json_response({"status": state}, 200 if state == "ready" else 503)


async def metrics(request: Request) -> Response:
    """Metrics in the text format of Prometheus."""
    text = request.app.state.service.metrics.page()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def page() -> Response:
    """The page for trying out the scorer."""
    return HTMLResponse(html_page.page(), headers=html_page.headers())
