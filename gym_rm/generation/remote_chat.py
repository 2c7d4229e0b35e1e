"""A chat model behind an OpenAI-compatible server (`/v1/chat/completions`)."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gym_rm.config import parse_settings
from gym_rm.engine.text.control_tokens import COMMON, spaced_messages
from gym_rm.engine.text.thinking import FIELDS, Thinking
from gym_rm.errors import ConfigError, ConversationError, RemoteError
from gym_rm.generation.chat import LAST_TOKENS, TOP_LOGPROBS, ChatReply, RemoteChatOptions, merge_system
from gym_rm.generation.choices import told_masses
from gym_rm.http_client.addresses import parse_urls, read_key
from gym_rm.http_client.client import HTTPClient
from gym_rm.http_client.responses import InvalidReply, NoSuchRoute, Refused, first_model, parse_body
from gym_rm.plain_values import to_plain
from gym_rm.scorer import CALLS_THAT_WAIT, NeverCopied
from gym_rm.types import Conversation, Message, Provenance

ROUTE = "/v1/chat/completions"


class RemoteChatModel(NeverCopied):
    """Answers conversations with a server; see `ChatModel`.

    Servers read control tokens in messages as such. Therefore those of common chat templates, or of `tokenizer`, are
    sent with spaces in them (`< |im_end| >`), so that a message cannot forge a turn.

    Args:
        url: address of the server, with or without `/v1`.
        **options: the fields of `RemoteChatOptions`.

    Raises:
        ConfigError: an option is invalid.

    Example:
        >>> model = RemoteChatModel("http://127.0.0.1:8000", key="env:JUDGE_KEY")  # doctest: +SKIP
        >>> model.reply([[{"role": "user", "content": "Hi"}]], seeds=[0])  # doctest: +SKIP
    """

    max_concurrent_calls = CALLS_THAT_WAIT

    def __init__(self, url: str, **options: Any) -> None:
        self.options = chosen = parse_settings(RemoteChatOptions, options)
        (self.url,), key = parse_urls([re.sub(r"(/v1)?(/chat/completions)?/*$", "", url)]), read_key(chosen.key)
        self._client = HTTPClient(
            [self.url],
            key=key,
            attempt_timeout=chosen.attempt_timeout or chosen.timeout / 4,
            max_retries=chosen.max_retries,
            max_connections=chosen.max_connections,
        )
        self._served = chosen.name
        self._control = _patterns(self.options.tokenizer)

    def __repr__(self) -> str:
        return f"RemoteChatModel({self.url!r})"

    @property
    def provenance(self) -> Provenance:
        """How replies are made."""
        settings = {"url": self.url, **self.options.settings, **self.options.extra}
        settings |= {} if self.options.system_role else {"system_role": False}
        return Provenance(type(self).__name__, self._served or self.url, settings=settings)

    def reply(
        self, conversations: Sequence[Conversation], *, seeds: Sequence[int], deadline: float = math.inf
    ) -> list[ChatReply]:
        """Return a reply to each of N conversations; see `ChatModel.reply`.

        Raises:
            ConfigError: the key is refused, or the server has no such route or model.
        """
        count = self.options.top_logprobs
        told = {"logprobs": True, "top_logprobs": count} if count else {}
        fields = [{**told, "seed": int(seed) % 2**31, **self.options.extra} for seed in seeds]
        return self._client.run(self._reply_all(conversations, fields, deadline))

    def choose(
        self, conversations: Sequence[Conversation], choices: Sequence[Sequence[str]], *, begin: str, deadline: float
    ) -> list[ChatReply]:
        """Return how likely choices are, as far as a server tells; see `LocalChatModel.choose`.

        It tells the most likely tokens along one reply, and must know `continue_final_message`, as vLLM and SGLang do.
        """
        told = {"logprobs": True, "top_logprobs": self.options.top_logprobs or TOP_LOGPROBS, "temperature": 0}
        told |= {"continue_final_message": True, "add_generation_prompt": False}
        # A choice has at most a token for each character and a space; the next one tells whether it goes on.
        sizes = [min(LAST_TOKENS, 2 + max(map(len, texts))) for texts in choices]
        fields = [{**self.options.extra, **told, "max_tokens": size} for size in sizes]
        begun = [[*each, Message(role="assistant", content=begin)] for each in conversations]
        replies = self._client.run(self._reply_all(begun, fields, deadline))
        for row, reply in enumerate(replies):
            if reply.error is None:
                masses, unknown = told_masses(reply.top_log_probs, choices[row])
                replies[row] = replace(reply, finished=True, masses=masses, unknown=unknown)
        return replies

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    async def _reply_all(
        self, conversations: Sequence[Conversation], fields: Sequence[dict[str, Any]], deadline: float
    ) -> list[ChatReply]:
        if not conversations:
            return []
        deadline = asyncio.get_running_loop().time() + min(deadline - time.monotonic(), self.options.timeout)
        try:
            if self._served is None:
                self._served, _ = await self._client.send(
                    "/v1/models", read=lambda body: first_model(parse_body(body))[0], deadline=deadline
                )
        except NoSuchRoute as error:
            raise ConfigError(f"{error} Pass name=, the name of the served model.") from error
        except (RemoteError, Refused) as error:  # the server does not say what it serves
            return [ChatReply(error=str(error)) for _ in conversations]
        rows = zip(conversations, fields, strict=True)
        return await self._client.all_of(self._reply(conversation, own, deadline) for conversation, own in rows)

    async def _reply(self, conversation: Conversation, fields: dict[str, Any], deadline: float) -> ChatReply:
        """Return the reply to a request with these other fields."""
        messages = list(conversation) if self.options.system_role else merge_system(conversation)
        body = {
            "model": self._served,
            "messages": to_plain(spaced_messages(messages, self._control)),
            "temperature": self.options.temperature,
            "max_tokens": self.options.max_new_tokens,
            **fields,
        }
        try:
            encoded = json.dumps(body, ensure_ascii=False).encode()
            reply, _ = await self._client.send(ROUTE, encoded, read=_read_reply, deadline=deadline)
        except UnicodeEncodeError as error:
            return ChatReply(error=f"a message cannot be sent as UTF-8: {error}")
        except Refused as error:
            return ChatReply(error=f"{self.url} refused the conversation: {error}")
        except NoSuchRoute as error:
            raise ConfigError(f"{self.url} has no model {self._served!r} or no {ROUTE}: {error}") from error
        except RemoteError as error:
            return ChatReply(error=str(error))
        return reply


def _patterns(tokenizer: Any) -> Sequence[re.Pattern[str]]:
    """Return what finds control tokens: those of common templates, and of a tokenizer."""
    if tokenizer is None:
        return (COMMON,)
    from gym_rm.engine.loading.files import check_tokenizer  # imports transformers, which is slow

    loaded = check_tokenizer(tokenizer)
    names = {str(token) for token in loaded.added_tokens_decoder.values() if not str(token).strip().isalnum()}
    names = {name for name in names | set(loaded.all_special_tokens) if len(name) > 2 and not name.isspace()}
    return COMMON, re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)", re.IGNORECASE)


def _read_reply(body: bytes) -> ChatReply:
    """Return the reply in the body of an answer.

    Raises:
        InvalidReply: it is not what a chat route answers.
    """
    answer = parse_body(body)
    try:
        (choice,) = answer["choices"]
        message, reason = choice["message"], choice.get("finish_reason")
        if not message.keys() & {"content", "refusal", "tool_calls", *FIELDS}:
            raise KeyError("content")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidReply(f"no reply in {body[:80]!r}") from error
    if reason == "abort":
        raise InvalidReply("the server aborted it: it is being stopped, or was paused")
    if reason == "content_filter":
        return ChatReply(error="the server's content filter withheld the reply")
    try:
        _, text = Thinking().split(message)
    except ConversationError as error:
        raise InvalidReply(str(error)) from error
    usage = answer.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    return ChatReply(
        text or "",
        reason == "stop" and bool(text),
        num_tokens=tokens if isinstance(tokens, int) else None,
        top_log_probs=_top_log_probs(choice.get("logprobs")),
    )


def _top_log_probs(told: Any) -> tuple[tuple[str, dict[str, float]], ...]:
    """Return the last tokens with the most likely ones in their places; empty if the server does not tell them.

    Raises:
        InvalidReply: they are malformed.
    """
    if not isinstance(told, dict) or not told.get("content"):
        return ()
    try:
        return tuple(
            (
                str(each["token"]),
                {str(one["token"]): float(one["logprob"]) for one in (*(each.get("top_logprobs") or ()), each)},
            )
            for each in told["content"][-LAST_TOKENS:]
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidReply(f"malformed logprobs: {str(told)[:80]}") from error
