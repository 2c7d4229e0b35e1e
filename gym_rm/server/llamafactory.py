"""LLaMA-Factory's `POST /llamafactory`, for PPO with `reward_model_type: api`.

LLaMA-Factory sends whole texts, rendered by the policy's template, and does not say where a reply begins. It reads
`scores` from every reply, also from one with an error status, so an error has no `scores`.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from gym_rm.server.openrlhf import policy_texts
from gym_rm.server.request_bodies import RequestBody, Texts
from gym_rm.server.responses import failed_rows, json_response
from gym_rm.server.service import Service


class LlamaFactoryBody(RequestBody):
    """Body of `/llamafactory`: texts of prompts with their replies. The model is not compared."""

    model: str | None = None
    messages: Texts


async def scores(body: LlamaFactoryBody, request: Request) -> Response:
    """The rewards of rendered texts, as `scores`."""
    service: Service = request.app.state.service
    texts = policy_texts(request, "LLaMA-Factory")
    with failed_rows():
        conversations = await asyncio.to_thread(lambda: [*map(texts.split, body.messages)])
        found = await service.score(conversations, request)
        return json_response({"scores": found.rewards_or_fallback(service.options.fallback_reward)})
