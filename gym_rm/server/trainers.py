"""The routes of trainers that send texts: OpenRLHF's `/get_reward`, slime's `/slime`, LLaMA-Factory's `/llamafactory`.

The texts are what the policy read and wrote, with special tokens; the policy's tokenizer finds the messages in them.
Labels become the prompts' `answer`, for verifiers. A sample without a score refuses the request, because every trainer
would train on any number instead.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from gym_rm.data.messages import RENDERED, join_reply
from gym_rm.data.policy_texts import PolicyTexts
from gym_rm.data.prompts import prompt_of_columns
from gym_rm.errors import ConversationError
from gym_rm.scores import Scores
from gym_rm.server.request_bodies import Objects, RequestBody, Texts
from gym_rm.server.responses import RequestError, failed_rows, json_response, sigmoid
from gym_rm.server.service import Service
from gym_rm.types import Conversation, Prompt


class GetRewardBody(RequestBody):
    """Body of `/get_reward`: texts of prompts and replies, the texts of their prompts, and the labels of these."""

    query: Texts
    prompts: Texts | None = None
    labels: list[Any] | None = None


class SlimeBody(RequestBody):
    """Body of `/slime`: a prompt (the text that the policy read, or messages), its response and its label."""

    prompt: str | Objects
    response: str
    label: Any = None


class LlamaFactoryBody(RequestBody):
    """Body of `/llamafactory`: texts of prompts with their replies. The model is not compared."""

    model: str | None = None
    messages: Texts


async def openrlhf(body: GetRewardBody, request: Request) -> Response:
    """Rewards of samples, with their sigmoid and logs, for `--reward.remote_url http://127.0.0.1:5000/get_reward`."""
    service: Service = request.app.state.service
    texts = _policy_texts(request, "OpenRLHF")
    with failed_rows():
        conversations = await asyncio.to_thread(_conversations, texts, body)
        labels = body.labels or [None] * len(conversations)
        prompts = [_prompt(*row) for row in zip(conversations, labels, strict=True)]
        scores = await service.score(conversations, request, prompts)
        return json_response(lists_of(scores, service.options.fallback_reward))


async def slime(body: SlimeBody, request: Request) -> Response:
    """The reward of a sample as a number, for `--rm-type remote_rm --rm-url http://127.0.0.1:5000/slime`.

    slime reads the body of the reply as the reward, whatever it is, and sends a request again after an error status.
    """
    service: Service = request.app.state.service
    with failed_rows():
        rendered = any(isinstance(text, str) and RENDERED.search(text) for text in (body.prompt, body.response))
        texts = _policy_texts(request, "slime") if rendered else request.app.state.policy_texts
        conversation = await asyncio.to_thread(_sample, texts, body)
        scores = await service.score([conversation], request, [_prompt(conversation, body.label)])
        return json_response(scores.rewards_or_fallback(service.options.fallback_reward)[0])


async def llamafactory(body: LlamaFactoryBody, request: Request) -> Response:
    """The rewards of whole texts as `scores`, for PPO with `reward_model_type: api`.

    LLaMA-Factory does not say where a reply begins. It reads `scores` from every reply, also from one with an error
    status, so an error has no `scores`.
    """
    service: Service = request.app.state.service
    texts = _policy_texts(request, "LLaMA-Factory")
    with failed_rows():
        conversations = await asyncio.to_thread(lambda: [*map(texts.split, body.messages)])
        scores = await service.score(conversations, request)
        return json_response({"scores": scores.rewards_or_fallback(service.options.fallback_reward)})


def _policy_texts(request: Request, trainer: str) -> PolicyTexts:
    """Return what reads the texts of a trainer. Raises RequestError if the server has no tokenizer for it."""
    texts: PolicyTexts | None = request.app.state.policy_texts
    if texts is None:
        raise RequestError(
            "not_supported",
            f"{trainer}'s texts are parsed with the policy's tokenizer; start the server with --policy-tokenizer.",
        )
    return texts


def _prompt(conversation: Conversation, label: Any) -> Prompt:
    return prompt_of_columns(conversation[:-1], {"label": label}, None, answer_column="label")


def _conversations(texts: PolicyTexts, body: GetRewardBody) -> list[Conversation]:
    """Return the conversations of OpenRLHF's samples; the message of an error has the row."""
    queries, prompts, labels = body.query, body.prompts or [], body.labels
    if len(prompts) != len(queries) or (labels is not None and len(labels) != len(queries)):
        raise ConversationError(
            f"expected one prompt and one label for each query, got {len(queries)} queries, {len(prompts)} prompts "
            f"and {'no' if labels is None else len(labels)} labels."
        )
    conversations = []
    for row, (prompt, query) in enumerate(zip(prompts, queries, strict=True)):
        try:
            conversations.append(texts.conversation(prompt, query))
        except ConversationError as error:
            raise ConversationError(f"query {row}: {error}") from error
    return conversations


def _sample(texts: PolicyTexts | None, body: SlimeBody) -> Conversation:
    """Return the conversation of a sample. A text prompt is one user message if there is no tokenizer to read it."""
    if texts is not None and isinstance(body.prompt, str):
        return texts.conversation(body.prompt, body.prompt + body.response)
    return join_reply(body.prompt, body.response if texts is None else texts.only_reply(body.response))


def lists_of(scores: Scores, fallback_reward: float | None) -> dict[str, Any]:
    """Return what OpenRLHF reads, as plain lists.

    `scores` is the sigmoid of the rewards, because OpenRLHF's dynamic filtering expects values between 0 and 1.

    Raises:
        ScoringError: a sample has no score, and `fallback_reward` is None.
    """
    rewards = scores.rewards_or_fallback(fallback_reward)
    logs = {
        "score_ok": [float(error is None) for error in scores.errors],
        "num_tokens": scores.num_tokens.astype(float).tolist(),
        "truncated_tokens": scores.truncated_tokens.astype(float).tolist(),
    }
    for name, values in scores.components.items():  # OpenRLHF ends if samples do not have the same logs
        logs[f"component_{name}"] = np.nan_to_num(values, posinf=0, neginf=0).tolist()
        logs[f"has_{name}"] = np.isfinite(values).astype(float).tolist()
    return {"rewards": rewards, "scores": [sigmoid(reward) for reward in rewards], "extra_logs": logs}
