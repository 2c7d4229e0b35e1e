"""The own routes: rewards of conversations, information, health, metrics and new weights."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Literal

import pydantic
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from gym_rm.errors import GymRMError
from gym_rm.server.door import AllTurns, Item
from gym_rm.server.errors import Refused
from gym_rm.server.reading import Body, check_fields, invalid_fields, is_lenient, read_json, validate
from gym_rm.server.replies import body_of, reply
from gym_rm.server.service import Service
from gym_rm.types import Message, Prompt

ACTIVATIONS = {
    "/v1/rewards": "none",
    "/classify": "sigmoid, or none with use_activation=false; none for a body with text or input_ids (SGLang)",
    "/score": "sigmoid, or none with use_activation=false",
    "/rerank": "sigmoid, or none with use_activation=false (vLLM) or raw_scores=true (TEI)",
    "/pooling": "sigmoid, or none with use_activation=false",
    "/v1/embeddings": "none",
    "/predict": "sigmoid, or none with raw_scores=true",
    "/get_reward": "none for rewards, sigmoid for scores",
}


class RewardsBody(Body):
    """Body of `POST /v1/rewards`."""

    conversations: list[Any]
    prompts: list[dict[str, Any] | None] | None = None
    turns: Literal["last", "all"] = "last"


class PromptBody(Body):
    """One entry of `prompts`."""

    id: str | None = None
    prompt_id: str | None = None
    answer: str | None = None
    metadata: dict[str, Any] = pydantic.Field(default_factory=dict)
    user_turns: list[str] = pydantic.Field(default_factory=list)
    messages: list[dict[str, Any]] | None = None


class WeightsBody(Body):
    """Body of `POST /v1/weights`."""

    path: str = pydantic.Field(min_length=1)


def add_native_routes(app: FastAPI, service: Service) -> None:
    """Add the own routes to an application."""

    @app.post("/v1/rewards", openapi_extra=body_of(RewardsBody))
    async def rewards(request: Request) -> Response:
        """Score conversations. A conversation without a score has an error, and the others keep their rewards."""
        body = validate(RewardsBody, await read_json(request), request)
        prompts = _prompts(body, request)
        items: list[Item] = list(body.conversations)
        if body.turns == "all":
            if not service.door.scores_turns:
                raise Refused("not_supported", f"the scorer of {service.model!r} cannot score all turns; omit turns.")
            items = [AllTurns(conversation) for conversation in items]
        scores = await service.score(items, request, prompts)
        if body.turns == "last":
            scores = dataclasses.replace(scores, turn_rewards=None)
        return reply({"model": service.model_of(scores), **scores.to_dict()})

    @app.post("/v1/weights", openapi_extra=body_of(WeightsBody))
    async def weights(request: Request) -> Response:
        """Load other weights between two batches."""
        if not service.options.allow_weight_updates:
            raise Refused("not_supported", "weight updates are off; start the server with --allow-weight-updates.")
        body = validate(WeightsBody, await read_json(request), request)
        try:
            seconds = await asyncio.to_thread(service.update_weights, body.path)
        except (GymRMError, OSError) as error:
            raise Refused("invalid_request", f"the weights are unchanged: {error}") from error
        return reply({"model": service.model, "provenance": _provenance(service), "seconds": seconds})

    @app.get("/info")
    async def info() -> Response:
        """Return the model, how it scores, the limits, and known conversations with their rewards."""
        known = service.options.policy_tokenizer is not None
        return reply(
            {
                "model": service.model,
                "provenance": _provenance(service),
                "limits": service.limits.to_dict(),
                "activations": {route: each for route, each in ACTIVATIONS.items() if known or route != "/get_reward"},
                "calibration": service.calibration,
            }
        )

    @app.get("/health")
    async def health() -> Response:
        """The process lives."""
        return reply({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """Status 200 if requests are accepted now, else 503."""
        return reply({"status": service.state}, 200 if service.state == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """The page for trying out the scorer."""
        return _page() or reply({"status": "ok", "routes": sorted(ACTIVATIONS)})


def _page() -> Response | None:
    """Return the page for trying out the scorer, if the package has it."""
    try:
        from gym_rm.server import page  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        return None
    return HTMLResponse(page.page(), headers=page.headers())


def _provenance(service: Service) -> Any:
    made = getattr(service.scorer, "provenance", None)
    return None if made is None else dataclasses.asdict(made)


def _prompts(body: RewardsBody, request: Request) -> list[Prompt | None] | None:
    if body.prompts is None:
        return None
    if len(body.prompts) != len(body.conversations):
        raise Refused(
            "invalid_request",
            f"prompts must have one entry per conversation, got {len(body.prompts)} for {len(body.conversations)}.",
            param="prompts",
        )
    found: list[Prompt | None] = []
    for row, (given, conversation) in enumerate(zip(body.prompts, body.conversations, strict=True)):
        if given is None:
            found.append(None)
            continue
        if not is_lenient(request):
            check_fields(given, PromptBody.model_fields, f"prompts.{row}.")
        try:
            prompt = PromptBody.model_validate(given)
        except pydantic.ValidationError as error:
            refused = invalid_fields(error)
            raise Refused(refused.reason, f"prompts.{row}: {refused.message}", f"prompts.{row}") from None
        before: list[Any] = prompt.messages if prompt.messages is not None else _before_reply(conversation)
        messages: tuple[Message, ...] = tuple(before)
        name = prompt.prompt_id or prompt.id or str(row)
        found.append(Prompt(messages, name, tuple(prompt.user_turns), prompt.answer, prompt.metadata))
    return found


def _before_reply(conversation: Any) -> list[Any]:
    return conversation[:-1] if isinstance(conversation, list) else []
