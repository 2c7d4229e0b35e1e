"""Check the messages of a conversation, and apply a function to every text in them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from gym_rm.engine.text.tool_calls import decode_arguments
from gym_rm.errors import ConversationError, warn_once
from gym_rm.types import Conversation, Message

ROLE = re.compile(r"\w[\w.-]*( [\w.-]+)*")
COMMON_ROLES = frozenset({"system", "user", "assistant"})
KNOWN_ROLES = COMMON_ROLES | {"tool", "developer", "function", "ipython"}
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
CHARACTERS_PER_TOKEN = 3  # or a little more, so that a chunk of text is one batch
TOOLS_ROLE = "<tools>"  # no message of a user can have this role, which is not a word


def check_conversation(conversation: Any) -> Conversation:
    """Return the conversation with text parts joined, arguments of tool calls decoded, and without empty fields.

    Fields besides `role` and `content` (`tool_calls`, `name`, `reasoning_content`, ...) are kept for the chat template.

    Raises:
        ConversationError: the value is not a list of messages, or a message is invalid.
    """
    if not isinstance(conversation, Sequence) or isinstance(conversation, str | bytes):
        raise ConversationError(
            f"a conversation must be a list of {{'role', 'content'}} messages; got {type(conversation).__name__}."
        )
    if not conversation:
        raise ConversationError("the conversation is empty; expected at least one message.")
    return [_check_message(message, f"message {index}") for index, message in enumerate(conversation)]


def _check_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping) or "role" not in message:
        raise ConversationError(f"{where} must be {{'role': ..., 'content': ...}}; got {message!r:.200}.")
    if len(message) == 2 and isinstance(message.get("content"), str):
        checked: dict[str, Any] = cast(dict[str, Any], message)
    else:
        message = plain_message(message)
        given = decode_arguments(message)
        checked = {key: value for key, value in given.items() if value is not None and value not in ("", [], {}, ())}
        checked |= {"role": message["role"], "content": _content(message, where)}
    check_text(checked["content"], f"the content of {where}")
    check_text(checked["role"], f"the role of {where}")
    for key in extra_fields(checked):
        map_leaves(checked[key], functools.partial(check_leaf, where=f"{key!r} of {where}"), keys=True)
    calls = checked.get("tool_calls", [])
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise ConversationError(f"'tool_calls' of {where} must be a list of calls, got {calls!r:.100}.")
    role = checked["role"]
    if role not in COMMON_ROLES and not ROLE.fullmatch(role):
        raise ConversationError(f"{where} has the role {role!r}; expected a word such as 'user'.")
    return cast(Message, checked)


def _content(message: Mapping[str, Any], where: str) -> Any:
    """Return the content as text: text parts joined, and empty if there are only tool calls or no result."""
    if message.get("content") is None and (message.get("tool_calls") or message["role"] == "tool"):
        return ""
    if "content" not in message:
        raise ConversationError(f"{where} must be {{'role': ..., 'content': ...}}; got {message!r:.200}.")
    content = plain_content(message["content"])
    if isinstance(content, list):
        other = next(part for part in content if not _is_text(part))
        shown = other.get("type", other) if isinstance(other, dict) and "text" not in other else other
        raise ConversationError(
            f"the content of {where} has a part of the type {shown!r:.80}, but the reward model reads only text; "
            "remove the part, or describe it in a part {'type': 'text', 'text': ...}."
        )
    return content


def plain_content(content: Any) -> Any:
    """Return the text of content in parts, as in `plain_message`; return other content unchanged."""
    return plain_message({"content": content})["content"]


def plain_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message of a server or a file with a text as its content, and its thinking in `reasoning_content`.

    Text parts (`{"type": "text", "text": ...}`, `output_text`, `refusal`) are joined, and thinking parts too, whose
    text can be a list of parts. A message that refuses has its refusal as content. If another part is there, such as an
    image, the message is unchanged.
    """
    content = message.get("content")
    if content is None and isinstance(message.get("refusal"), str):
        return {**message, "content": message["refusal"], "refusal": None}
    if not isinstance(content, list) or not all(_is_text(part) for part in content):
        return message
    said = "".join(part_text(part) for part in content if part["type"] in TEXT_PARTS)
    thoughts = [message.get("reasoning_content"), *(part for part in content if part["type"] in THOUGHTS)]
    thinking = "\n".join(filter(None, map(part_text, thoughts)))
    return {**message, "content": said} | ({"reasoning_content": thinking} if thinking else {})


def _is_text(part: Any) -> bool:
    """Return whether a part of a message is thinking, or a text that it has."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    name = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    return kind in THOUGHTS or (name is not None and isinstance(part.get(name), str))


def part_text(part: Any) -> str:
    """Return the text of a part of a message, or of a list of parts; the empty text if it has none."""
    if isinstance(part, list | tuple):
        return "".join(map(part_text, part))
    if isinstance(part, Mapping):
        return next(filter(None, (part_text(part.get(name)) for name in ("text", "refusal", *THOUGHTS, "summary"))), "")
    return part if isinstance(part, str) else ""


def reply_text(conversation: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message, which must be a reply.

    Raises:
        ConversationError: it is no reply, or its content is no text.
    """
    last = conversation[-1] if conversation else {}
    if last.get("role") != "assistant":
        raise ConversationError(f"the last message must be a reply with the role 'assistant', got {last!r:.100}")
    content = _content(last, "the reply")
    if not isinstance(content, str):
        raise ConversationError(f"the content of the reply must be a text, got {content!r:.100}")
    return content


def warn_without_reply(role: str) -> None:
    """Warn about a conversation whose last message has another role than `"assistant"`."""
    if role != "assistant":
        warn_once(
            f"a conversation ends with a message of the role {role[:80]!r}, so there is no reply to score. Reward "
            "models are trained on conversations that end with a reply; add it as a message with the role 'assistant'."
        )


def with_tools(conversation: Conversation, tools: Sequence[Mapping[str, Any]]) -> Conversation:
    """Return the conversation after a message that holds the tools, so that their texts are data like all others.

    Only the template of a conversation writes this message.

    Raises:
        ConversationError: the tools have other values than those of JSON.
    """
    if not tools:
        return conversation
    map_leaves(tools, functools.partial(check_leaf, where="a tool"), keys=True)
    first = cast(Message, {"role": TOOLS_ROLE, "content": "", "tools": map_leaves(tools, lambda leaf: leaf)})
    return [first, *conversation]


def split_tools(conversation: Conversation) -> tuple[list[Any] | None, Conversation]:
    """Return the tools, or None, and the messages of a conversation of `with_tools`."""
    if conversation and conversation[0]["role"] == TOOLS_ROLE:
        return cast(dict[str, Any], conversation[0])["tools"], conversation[1:]
    return None, conversation


def extra_fields(message: Mapping[str, Any]) -> list[str]:
    """Return the keys of a message besides `role` and `content`."""
    return [] if len(message) == 2 else [key for key in message if key not in ("role", "content")]


def map_texts(message: Message, function: Callable[[str], str]) -> Message:
    """Return the message with a function applied to its content, and to every text and key in its other fields."""
    changed = {"role": message["role"], "content": function(message["content"])}
    for key in extra_fields(message):
        value = cast(dict[str, Any], message)[key]
        changed[key] = map_leaves(value, lambda leaf: function(leaf) if isinstance(leaf, str) else leaf, keys=True)
    return cast(Message, changed)


def map_leaves(
    value: Any, function: Callable[[Any], Any], *, keys: bool = False, skip: frozenset[str] = frozenset()
) -> Any:
    """Return nested lists and mappings with a function applied to their values (with `keys`, also to their keys).

    Values of the keys in `skip` are not changed.
    """
    if isinstance(value, Mapping):
        return {
            function(key) if keys else key: each if key in skip else map_leaves(each, function, keys=keys, skip=skip)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [map_leaves(each, function, keys=keys, skip=skip) for each in value]
    return function(value)


def texts_of(message: Message) -> list[str]:
    """Return the content of a message, and every text and key in its other fields."""
    found: list[str] = []

    def collect(text: str) -> str:
        found.append(text)
        return text

    if len(message) == 2:
        return [message["content"]]
    map_texts(message, collect)
    return found


def check_leaf(value: Any, where: str) -> Any:
    """Raise ConversationError if a value in a field of a message is neither text nor a number, a boolean or None."""
    if isinstance(value, str):
        check_text(value, where)
    elif not isinstance(value, int | float | None):
        raise ConversationError(
            f"{where} has a value of the type {type(value).__name__}, expected text, numbers, lists and mappings: "
            f"{value!r:.80}."
        )
    return value


def check_text(text: Any, where: str) -> None:
    """Raise ConversationError if the value is not a string, or cannot be encoded as UTF-8."""
    if not isinstance(text, str):
        raise ConversationError(f"{where} must be a string; got {type(text).__name__}: {text!r:.100}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConversationError(
            f"{where} contains a lone surrogate, {text[error.start]!r} at character {error.start}, which no tokenizer "
            "can encode; decode the original bytes with errors='replace'."
        ) from None


def joined(messages: Sequence[Message]) -> str:
    """Join the texts of the messages with line breaks, for tokenizers without a chat template."""
    return "\n".join(message["content"] for message in messages)
