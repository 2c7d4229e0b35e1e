"""Messages, from all the forms in which files and libraries hold them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from gym_rm.data.rows import show
from gym_rm.errors import ConfigError
from gym_rm.types import Conversation, Message

# What chat templates write around turns: ChatML and Qwen, Llama 3, Gemma, Llama 2 and Mistral, Phi, DeepSeek.
_RENDERED = re.compile(
    r"<\|(im_start|im_end|start_header_id|eot_id|user|assistant|end|begin_of_text)\|>|<start_of_turn>|\[INST\]|<｜User｜>"
)


def parse_messages(value: Any, where: str, field: str, *, text_role: str = "user") -> tuple[Message, ...]:
    """Messages of a field that holds a text (one message of `text_role`) or a list of `{"role", "content"}`.

    Raises:
        ConfigError: anything else, or an empty list.
    """
    if isinstance(value, str):
        return ({"role": text_role, "content": value},)
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not value:
        raise ConfigError(f"{where}: {field!r} must be a text or a list of messages, got {show(value)}.")
    return tuple(_message(message, where, f"{field}[{index}]") for index, message in enumerate(value))


def join_reply(prompt: Any, reply: Any, where: str = "prompt") -> Conversation:
    """A prompt and a reply as trainers hold them, each a text or messages, as one conversation.

    A text prompt becomes one user message, a text reply one assistant message. Messages are passed on unchanged; the
    scorer refuses rows with content that it cannot read (images, tool calls).

    Raises:
        ConfigError: a prompt that is neither text nor messages, or that a chat template has already been applied to.
    """
    if isinstance(reply, str):
        reply = [Message(role="assistant", content=reply)]
    return [*prompt_messages(prompt, where), *_messages(reply, f"the reply to {where}")]


def prompt_messages(prompt: Any, where: str = "prompt") -> list[Message]:
    """The messages of a prompt, see `join_reply`."""
    if isinstance(prompt, str):
        refuse_rendered(prompt, where)
        prompt = [Message(role="user", content=prompt)]
    return _messages(prompt, where)


def refuse_rendered(text: str, where: str) -> None:
    """Raise `ConfigError` for a prompt that a chat template has been applied to: it would be applied twice."""
    found = _RENDERED.search(text)
    if found is not None:
        raise ConfigError(
            f"{where} holds {found[0]!r}: the policy's chat template has been applied to it, and the reward model's "
            "would be applied on top. Give messages, or name the tokenizer that wrote it with policy_tokenizer= where "
            f"the adapter has that; got {text[:200]!r}."
        )


def plain_content(content: Any) -> Any:
    """The text of a content in parts, `[{"type": "text", "text": ...}]`; any other content unchanged."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content


def _messages(value: Any, where: str) -> list[Message]:
    """Messages from a list, a tuple or an array of dicts."""
    try:
        messages = [{**message, "content": plain_content(message.get("content"))} for message in value]
    except (TypeError, AttributeError):
        messages = []
    if not messages:
        raise ConfigError(f"{where} must be a text or a list of messages, got {value!r:.200}.")
    return cast("list[Message]", messages)


def _message(message: Any, where: str, field: str) -> Message:
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where}: {field!r} must be a message {{'role', 'content'}}, got {show(message)}.")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            found = show(message[key]) if key in message else f"only the keys {sorted(message)}"
            raise ConfigError(f"{where}: '{field}.{key}' must be a text, got {found}.")
    # Column formats (parquet, datasets) fill the keys that only other messages have with None.
    return cast(Message, {key: value for key, value in message.items() if value is not None})
