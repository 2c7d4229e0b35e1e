"""Parse messages from the forms in which files and libraries store them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from gym_rm.data.rows import show, without_filled
from gym_rm.engine.text.messages import plain_message
from gym_rm.engine.text.tool_calls import decode_arguments
from gym_rm.errors import ConfigError
from gym_rm.types import Conversation, Message

# Markup of turns in chat templates: ChatML and Qwen, Llama 3, Gemma, Llama 2 and Mistral, Phi, DeepSeek, NeMo.
RENDERED = re.compile(
    r"<\|(im_start|im_end|start_header_id|eot_id|user|assistant|end|begin_of_text)\|>|<start_of_turn>|\[INST\]"
    r"|<｜User｜>|<extra_id_1>"
)


def parse_messages(value: Any, where: str, field: str, *, text_role: str = "user") -> tuple[Message, ...]:
    """Return the messages of a field: a text (one message of `text_role`) or a list of `{"role", "content"}`.

    Content in text parts is joined, and arguments of tool calls are decoded. Other fields (`name`, ...) are kept,
    without the value None.

    Raises:
        ConfigError: the value is neither of these, the list is empty, or a content has other parts than text.
    """
    if isinstance(value, str):
        return ({"role": text_role, "content": value},)
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not value:
        raise ConfigError(f"{where}: {field!r} must be a text or a list of messages, got {show(value)}.")
    return tuple(_message(message, where, f"{field}[{index}]") for index, message in enumerate(value))


def join_reply(prompt: Any, reply: Any, where: str = "prompt") -> Conversation:
    """Join a prompt and a reply, each a text or messages, into one conversation.

    A text prompt becomes one user message, a text reply one assistant message. Other fields (tool calls, names) are
    kept for the chat template. Other content than text (images) is kept; the scorer returns an error for its row.

    Raises:
        ConfigError: the prompt or the reply is neither a text nor messages, or a chat template has already been applied
            to the prompt.
    """
    if isinstance(reply, str):
        reply = [Message(role="assistant", content=reply)]
    return [*prompt_messages(prompt, where), *_messages(reply, f"the reply to {where}")]


def prompt_messages(prompt: Any, where: str = "prompt") -> list[Message]:
    """Return the messages of a prompt, as in `join_reply`."""
    if isinstance(prompt, str):
        refuse_rendered(prompt, where)
        prompt = [Message(role="user", content=prompt)]
    return _messages(prompt, where)


def refuse_rendered(text: str, where: str) -> None:
    """Raise ConfigError if a chat template has already been applied to the prompt."""
    found = RENDERED.search(text)
    if found is not None:
        raise ConfigError(
            f"{where} contains {found[0]!r}: the policy's chat template has been applied to it, and the reward model's "
            "template would be applied as well. Pass messages instead, or policy_tokenizer= if the adapter has this "
            f"option; got {text[:200]!r}."
        )


def check_encodable(text: str, where: str, field: str) -> None:
    """Raise ConfigError for a text that UTF-8 cannot encode, so that no tokenizer reads it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: {field} contains a lone surrogate, {text[error.start]!r} at character {error.start}, which "
            "UTF-8 cannot encode; correct the text."
        ) from error


def _messages(value: Any, where: str) -> list[Message]:
    """Return messages from a list, a tuple or an array of dicts, with text parts joined."""
    try:
        messages = [{"content": None, **plain_message(without_filled(message))} for message in value]
    except (TypeError, AttributeError):
        messages = []
    if not messages:
        raise ConfigError(f"{where} must be a text or a list of messages, got {value!r:.200}.")
    return cast("list[Message]", messages)


def _message(message: Any, where: str, field: str) -> Message:
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where}: {field!r} must be a message {{'role', 'content'}}, got {show(message)}.")
    # Column formats (parquet, datasets) add the keys of other messages with the value None.
    kept = {key: value for key, value in decode_arguments(plain_message(message)).items() if value is not None}
    if "content" in kept or kept.get("tool_calls"):
        kept.setdefault("content", "")
    for key in ("role", "content"):
        if not isinstance(kept.get(key), str):
            value = kept.get(key, message.get(key))
            found = show(value) if key in message else f"only the keys {sorted(message)}"
            advice = "; images and other parts than text are not scored" if isinstance(value, list) else ""
            raise ConfigError(f"{where}: '{field}.{key}' must be a text, got {found}{advice}.")
    return cast(Message, kept)
