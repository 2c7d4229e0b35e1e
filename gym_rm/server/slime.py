"""slime's `POST /slime`, for `--rm-type remote_rm --rm-url http://127.0.0.1:5000/slime`: one sample, one number.

slime reads the body of the reply as the reward, whatever it is, and sends a request again after an error status. The
`label` becomes the prompt's `answer`, for verifiers.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gym_rm.data.messages import RENDERED, join_reply
from gym_rm.data.policy_texts import PolicyTexts
from gym_rm.data.prompts import prompt_of_columns
from gym_rm.server.openrlhf import policy_texts
from gym_rm.server.request_bodies import Objects, RequestBody
from gym_rm.server.responses import failed_rows, json_response
from gym_rm.server.service import Service
from gym_rm.types import Conversation


class SlimeBody(RequestBody):
    """Body of `/slime`: a prompt (the text that the policy read, or messages), its response and its label."""

    prompt: str | Objects
    response: str
    label: Any = None


async def reward(body: SlimeBody, request: Request) -> Response:
    """The reward as a number."""
    service: Service = request.app.state.service
    with failed_rows():
        rendered = any(isinstance(text, str) and RENDERED.search(text) for text in (body.prompt, body.response))
        texts = policy_texts(request, "slime") if rendered else request.app.state.policy_texts
        conversation = await asyncio.to_thread(_conversation, texts, body)
        prompt = prompt_of_columns(conversation[:-1], {"label": body.label}, None, answer_column="label")
        scores = await service.score([conversation], request, [prompt])
        return json_response(scores.rewards_or_fallback(service.options.fallback_reward)[0])


def _conversation(texts: PolicyTexts | None, body: SlimeBody) -> Conversation:
    """Return the conversation of a sample. A text prompt is one user message if there is no tokenizer to read it."""
    if texts is not None and isinstance(body.prompt, str):
        return texts.conversation(body.prompt, body.prompt + body.response)
    return join_reply(body.prompt, body.response if texts is None else texts.reply(body.response))
