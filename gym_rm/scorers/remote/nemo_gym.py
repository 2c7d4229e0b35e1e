"""Rewards of a resources server of NeMo Gym: every conversation is a rollout that its `/verify` scores."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.checks import finite
from gym_rm.config import parse_settings
from gym_rm.data.prompts import name_of
from gym_rm.data.responses_api import create_params, items_of_messages
from gym_rm.engine.text.messages import check_conversation
from gym_rm.errors import ConfigError, ConversationError, RemoteError
from gym_rm.http_client.addresses import parse_urls, read_key
from gym_rm.http_client.client import HTTPClient
from gym_rm.http_client.responses import InvalidReply, NoSuchRoute, Refused, parse_body
from gym_rm.plain_values import to_plain
from gym_rm.scorer import CALLS_THAT_WAIT, NeverCopied, check_rows
from gym_rm.scorers.remote.options import ConnectionOptions
from gym_rm.scorers.remote.protocols import failed_row, to_json
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Prompt, Prompts, Provenance


class NemoGymScorer(NeverCopied):
    """Scores conversations with a resources server of NeMo Gym; `{"kind": "nemo_gym", "url": "http://..."}` loads it.

    Each conversation is a session: its data row goes to `/seed_session`, the row and the replies go to `/verify`. The
    row is `Prompt.metadata` if that has `responses_create_params`; otherwise it is made of the messages, tools, answer
    (`expected_answer`) and metadata of the prompt. `reward_components` become `Scores.components`. A row that the
    server could not verify, or that it masks (`mask_sample`, `_ng_failure_class`), has an error.

    Args:
        url: the server, without a path.
        **options: the fields of `ConnectionOptions`.

    Raises:
        ConfigError: an option is invalid, the key is refused, or the server has no such routes.

    Example:
        >>> scorer = NemoGymScorer("http://127.0.0.1:12000")  # doctest: +SKIP
        >>> scorer.score(conversations, prompts).rewards  # doctest: +SKIP
    """

    max_concurrent_calls = CALLS_THAT_WAIT

    def __init__(self, url: str, **options: Any) -> None:
        chosen = parse_settings(ConnectionOptions, options)
        (self.url,) = parse_urls([url])
        self.options = chosen.model_copy(update={"key": None})
        self.provenance = Provenance("NemoGymScorer", self.url)
        self._client = HTTPClient(
            [self.url],
            key=read_key(chosen.key),
            attempt_timeout=chosen.attempt_timeout or chosen.timeout,
            max_retries=chosen.max_retries,
            max_connections=chosen.max_connections,
        )

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Score N conversations, `max_connections` at the same time; raises ScoringError if a row has no score."""
        check_rows(conversations, prompts)
        rows = zip(conversations, [None] * len(conversations) if prompts is None else prompts, strict=True)
        scores = Scores.concatenate(self._client.run(self._verify_all(list(rows))))
        return dataclasses.replace(scores, provenance=self.provenance).raise_for_errors()

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    async def _verify_all(self, rows: list[tuple[Conversation, Prompt | None]]) -> list[Scores]:
        deadline = asyncio.get_running_loop().time() + self.options.timeout
        return await self._client.all_of([self._verify(*row, deadline) for row in rows])

    async def _verify(self, conversation: Conversation, prompt: Prompt | None, deadline: float) -> Scores:
        try:
            row, response = _row_of(check_conversation(conversation), prompt)
            cookies: dict[str, str] = {}
            await self._client.send("/seed_session", to_json(row), read=bytes, deadline=deadline, cookies=cookies)
            body = to_json({**row, "response": response})
            scores, _ = await self._client.send("/verify", body, read=_read_row, deadline=deadline, cookies=cookies)
            return scores
        except NoSuchRoute as error:
            raise ConfigError(f"{self.url} is no resources server with /seed_session and /verify: {error}") from error
        except (ConversationError, RemoteError, Refused) as error:
            return failed_row(f"the server refused the row: {error}" if isinstance(error, Refused) else str(error))


def _row_of(conversation: Conversation, prompt: Prompt | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the data row, and the replies after its prompt as a response."""
    if prompt is None:
        last = max((k for k, turn in enumerate(conversation) if turn["role"] == "assistant"), default=None)
        prompt = Prompt(tuple(conversation[:last]), name_of(conversation[:last]))
    row: dict[str, Any] = to_plain(prompt.metadata)
    if "responses_create_params" not in row:
        row = {"expected_answer": prompt.answer, **row}
    row["responses_create_params"] = params = create_params(prompt)
    fixed = {"model": "policy", "object": "response", "parallel_tool_calls": True, "tool_choice": "auto"}
    fixed |= {"id": f"resp_{prompt.prompt_id}", "created_at": int(time.time()), "tools": params.get("tools") or []}
    return row, {**fixed, "output": items_of_messages(conversation[len(prompt.messages) :])}


def _read_row(body: bytes) -> Scores:
    reply = parse_body(body)
    if not isinstance(reply, Mapping):
        raise InvalidReply(f"the reply must be an object, got {reply!r:.80}")
    marks, nested = [reply.get("mask_sample"), reply.get("_ng_failure_class")], reply.get("instance_config")
    if any(marks) or (isinstance(nested, Mapping) and nested.get("mask_sample")):
        kind = reply.get("failure_kind") or reply.get("_ng_failure_class") or "masked"
        reason = reply.get("failure_reason") or reply.get("_ng_failure_judge_error")
        return failed_row(f"the server could not verify it: {kind}: {reason}")
    try:
        parts = dict(reply.get("reward_components") or {})
        components = {name: [finite(f"reward_components[{name!r}]", value)] for name, value in parts.items()}
        return Scores.from_rewards([finite("reward", reply.get("reward"))], components=components)
    except (TypeError, ValueError) as error:
        raise InvalidReply(f"the reward or its components are no numbers: {error}") from error
