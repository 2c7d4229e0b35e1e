"""OpenRLHF's `POST /get_reward`, for `--reward.remote_url http://127.0.0.1:5000/get_reward`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from gym_rm.adapters import check_fallback_reward
from gym_rm.adapters.openrlhf import lists_of, read_samples
from gym_rm.data.policy_texts import PolicyTexts
from gym_rm.errors import GymRMError
from gym_rm.server.errors import Refused
from gym_rm.server.reading import Body, check_fields, is_lenient, read_json
from gym_rm.server.replies import body_of, reply
from gym_rm.server.service import Service

FEW = 8  # samples that are parsed at once without another thread


class GetRewardBody(Body):
    """Body of `/get_reward`: texts of prompts and replies, and the labels of the prompts."""

    query: list[str]
    prompts: list[str] | None = None
    labels: list[Any] | None = None


def add_openrlhf_routes(app: FastAPI, service: Service) -> None:
    """Add `/get_reward` to an application, if the service has the policy's tokenizer."""
    options = service.options
    fallback = check_fallback_reward(options.fallback_reward)
    if options.policy_tokenizer is None:

        @app.post("/get_reward")
        async def without_tokenizer() -> Response:
            """Refuse: the policy's tokenizer is needed."""
            raise Refused(
                "not_supported",
                "OpenRLHF's texts are parsed with the policy's tokenizer; start the server with --policy-tokenizer.",
            )

        return
    texts = PolicyTexts(
        options.policy_tokenizer, apply_chat_template=options.apply_chat_template, input_template=options.input_template
    )

    @app.post("/get_reward", openapi_extra=body_of(GetRewardBody))
    async def get_reward(request: Request) -> Response:
        """Rewards of samples, with their sigmoid and logs."""
        body = await read_json(request)
        if not is_lenient(request):
            check_fields(body, GetRewardBody.model_fields)
        queries, prompts, labels = _fields(body)
        try:
            if len(queries) <= FEW:
                items, rows = read_samples(texts, queries, prompts, labels)
            else:
                items, rows = await asyncio.to_thread(read_samples, texts, queries, prompts, labels)
            scores = await service.score(items, request, rows)
            return reply(lists_of(scores, fallback))
        except GymRMError as error:
            raise Refused("failed_row", getattr(error, "summary", None) or str(error)) from error


def _fields(body: dict[str, Any]) -> tuple[list[str], list[str], list[Any] | None]:
    if not _is_texts(body.get("query")):
        raise Refused("invalid_request", "query must be a list of texts in a JSON object", param="query")
    if body["query"] and not _is_texts(body.get("prompts")):
        raise Refused(
            "invalid_request",
            "prompts must be a list of texts; they are needed to separate prompt and reply",
            param="prompts",
        )
    if not isinstance(body.get("labels"), list | None):
        raise Refused("invalid_request", "labels must be a list or null", param="labels")
    return body["query"], body.get("prompts") or [], body.get("labels")


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
