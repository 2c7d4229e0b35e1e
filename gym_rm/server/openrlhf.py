"""OpenRLHF's `POST /get_reward`, for `--reward.remote_url http://127.0.0.1:5000/get_reward`.

OpenRLHF sends texts, not messages: `prompts` are the texts of its data set, and `query` is a prompt with its reply,
including special tokens. The `labels` become the prompts' `answer`, for verifiers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from gym_rm.data.policy_texts import PolicyTexts
from gym_rm.data.prompts import prompt_of_columns
from gym_rm.errors import ConversationError
from gym_rm.scores import Scores
from gym_rm.server.request_bodies import RequestBody, Texts
from gym_rm.server.responses import RequestError, failed_rows, json_response, sigmoid
from gym_rm.server.service import Service
from gym_rm.types import Conversation, Prompt


class GetRewardBody(RequestBody):
    """Body of `/get_reward`: texts of prompts and replies, and the labels of the prompts."""

    query: Texts
    prompts: Texts | None = None
    labels: list[Any] | None = None


async def get_reward(body: GetRewardBody, request: Request) -> Response:
    """Rewards of samples, with their sigmoid and logs."""
    service: Service = request.app.state.service
    texts = policy_texts(request, "OpenRLHF")
    with failed_rows():
        conversations, prompts = await asyncio.to_thread(
            read_samples, texts, body.query, body.prompts or [], body.labels
        )
        scores = await service.score(conversations, request, prompts)
        return json_response(lists_of(scores, service.options.fallback_reward))


def policy_texts(request: Request, trainer: str) -> PolicyTexts:
    """Return what reads the texts of a trainer. Raises RequestError if the server has no tokenizer for it."""
    texts: PolicyTexts | None = request.app.state.policy_texts
    if texts is None:
        raise RequestError(
            "not_supported",
            f"{trainer}'s texts are parsed with the policy's tokenizer; start the server with --policy-tokenizer.",
        )
    return texts


def read_samples(
    texts: PolicyTexts, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any] | None
) -> tuple[list[Conversation], list[Prompt]]:
    """Return the conversations and the data rows of OpenRLHF's samples.

    Raises:
        ConversationError: a query does not begin with its prompt, or a prompt cannot be parsed; the message has the
            row.
    """
    if len(prompts) != len(queries) or (labels is not None and len(labels) != len(queries)):
        raise ConversationError(
            f"expected one prompt and one label for each query, got {len(queries)} queries, {len(prompts)} prompts "
            f"and {'no' if labels is None else len(labels)} labels."
        )
    conversations, rows = [], []
    for row, (prompt, query) in enumerate(zip(prompts, queries, strict=True)):
        try:
            conversations.append(texts.conversation(prompt, query))
        except ConversationError as error:
            raise ConversationError(f"query {row}: {error}") from error
        columns = {} if labels is None else {"label": labels[row]}
        rows.append(prompt_of_columns(conversations[-1][:-1], columns, None, answer_column="label"))
    return conversations, rows


def lists_of(scores: Scores, fallback_reward: float | None) -> dict[str, Any]:
    """Return what OpenRLHF reads, as plain lists.

    `scores` is the sigmoid of the rewards, because OpenRLHF's dynamic filtering expects values between 0 and 1.

    Raises:
        ScoringError: a sample has no score, and `fallback_reward` is None.
    """
    rewards = scores.rewards_or_fallback(fallback_reward)
    # OpenRLHF logs the mean of each list, and a component that some samples do not have is no number there.
    complete = {name: values for name, values in scores.components.items() if np.isfinite(values).all()}
    logs = {
        "score_ok": [float(error is None) for error in scores.errors],
        "num_tokens": scores.num_tokens.astype(float).tolist(),
        "truncated_tokens": scores.truncated_tokens.astype(float).tolist(),
        **{f"component_{name}": values.tolist() for name, values in complete.items()},
    }
    return {"rewards": rewards, "scores": [sigmoid(reward) for reward in rewards], "extra_logs": logs}
