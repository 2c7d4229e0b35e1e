"""OpenRLHF's `POST /get_reward`, for `--reward.remote_url http://127.0.0.1:5000/get_reward`."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gym_rm.adapters import check_fallback_reward
from gym_rm.adapters.openrlhf import lists_of, read_samples
from gym_rm.data.policy_texts import PolicyTexts
from gym_rm.errors import GymRMError
from gym_rm.server.options import ServerOptions
from gym_rm.server.request_bodies import RequestBody
from gym_rm.server.responses import RequestError, json_response
from gym_rm.server.service import Service


class GetRewardBody(RequestBody):
    """Body of `/get_reward`: texts of prompts and replies, and the labels of the prompts."""

    query: list[str]
    prompts: list[str] | None = None
    labels: list[Any] | None = None


def policy_texts(options: ServerOptions) -> PolicyTexts | None:
    """Return what parses OpenRLHF's texts, if the server has the policy's tokenizer."""
    check_fallback_reward(options.fallback_reward)
    if options.policy_tokenizer is None:
        return None
    return PolicyTexts(
        options.policy_tokenizer, apply_chat_template=options.apply_chat_template, input_template=options.input_template
    )


async def get_reward(body: GetRewardBody, request: Request) -> Response:
    """Rewards of samples, with their sigmoid and logs."""
    service: Service = request.app.state.service
    texts: PolicyTexts | None = request.app.state.policy_texts
    if texts is None:
        raise RequestError(
            "not_supported",
            "OpenRLHF's texts are parsed with the policy's tokenizer; start the server with --policy-tokenizer.",
        )
    try:
        conversations, prompts = await asyncio.to_thread(
            read_samples, texts, body.query, body.prompts or [], body.labels
        )
        scores = await service.score(conversations, request, prompts)
        return json_response(lists_of(scores, service.options.fallback_reward))
    except GymRMError as error:
        raise RequestError("failed_row", getattr(error, "summary", None) or str(error)) from error
