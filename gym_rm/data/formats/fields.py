"""Fields that rows of every shape have: the prompt, replies, numbers, and the name of the source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.data.formats.transcripts import parse_transcript
from gym_rm.data.messages import parse_messages
from gym_rm.data.prompts import PROMPT_FIELDS, prompt_field, split_reference
from gym_rm.data.rows import filled_fields, show
from gym_rm.errors import ConfigError
from gym_rm.types import Message

ALL_PROMPT_FIELDS = (*PROMPT_FIELDS, "instruction", "input")
SOURCE_FIELDS = ("source", "subset", "dataset", "domain")
REPLY_TEXTS = ("completion", "response", "text", "answer")

Messages = tuple[Message, ...]


def required(row: Mapping[str, Any], field: str, where: str) -> Any:
    """Return the value of a field. Raises ConfigError if the row does not have it."""
    if row.get(field) is None:
        raise ConfigError(f"{where}: the field {field!r} is missing, got the fields {filled_fields(row)}.")
    return row[field]


def number(value: Any, where: str, field: str) -> float:
    """Return a number, also one that is written as a text, as in csv files.

    Raises:
        ConfigError: the value is not a number, or it is NaN or infinite.
    """
    try:
        converted = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        converted = math.nan
    if not math.isfinite(converted):
        kind = "finite number" if isinstance(value, int | float) and not isinstance(value, bool) else "number"
        raise ConfigError(
            f"{where}: {field!r} must be a {kind}, got {show(value)}; leave it out (null) if it is not known."
        )
    return converted


def margin_of(value: Any, where: str, source: str = "'margin'") -> float | None:
    """Return a margin, or None for None.

    Raises:
        ConfigError: it is not a finite number, or it is negative: then the other reply is the better one.
    """
    margin = None if value is None else number(value, where, "margin")
    if margin is not None and margin < 0:
        raise ConfigError(
            f"{where}: {source} must not be negative, got {margin:g}; the preferred reply would be worse."
        )
    return margin


def required_prompt(row: Mapping[str, Any], where: str, missing: str) -> tuple[str, Messages]:
    """Return the name and the messages of the prompt. Raises ConfigError, naming the field `missing`, without one."""
    return prompt_field(row, where, ALL_PROMPT_FIELDS) or (missing, required(row, missing, where))


def parse_reply(value: Any, where: str, field: str) -> Messages:
    """Return the messages of a reply, or of a whole conversation: a text, a transcript or messages."""
    transcript = parse_transcript(value)
    if transcript is not None:
        return transcript
    return parse_messages(value, where, field, text_role="assistant")


def is_whole(messages: Messages) -> bool:
    """Return whether these messages are a whole conversation rather than a reply."""
    return messages[0]["role"] in ("system", "developer", "user")


def after(prompt: Messages, reply: Messages, where: str, field: str) -> Messages:
    """Return the messages after the prompt; `reply` is either these messages or the whole conversation."""
    if reply[: len(prompt)] == prompt and len(reply) > len(prompt):
        return reply[len(prompt) :]
    if is_whole(reply):
        raise ConfigError(
            f"{where}: {field!r} begins with a {reply[0]['role']} turn that is not in the prompt; "
            "expected only the reply, or the whole conversation with exactly the same prompt."
        )
    return reply


def answered(
    prompt: Messages, replies: Sequence[Messages], names: Sequence[str], where: str, field: str
) -> tuple[Messages, tuple[Messages, ...], dict[str, str]]:
    """Return the prompt, the messages after it in each reply, and the fields to add to the metadata.

    An assistant turn at the end of the prompt is not part of it, as in `load_prompts`: the replies replace it.
    """
    reference: dict[str, str] = {}
    if any(reply[0]["role"] == "assistant" for reply in replies):
        prompt, reference = split_reference(prompt, where, field)
    kept = tuple(after(prompt, reply, where, name) for reply, name in zip(replies, names, strict=True))
    return prompt, kept, reference


def source_of(row: Mapping[str, Any]) -> str:
    """Return the name of the data set or subset that a row comes from, or an empty text."""
    return next((row[name] for name in SOURCE_FIELDS if isinstance(row.get(name), str)), "")


def rest(row: Mapping[str, Any], *used: str) -> dict[str, Any]:
    """Return the other fields of a row."""
    return {key: value for key, value in row.items() if key not in used}


def ranks_of(scores: Sequence[float]) -> tuple[float, ...]:
    """Return the ranks of replies with these scores: 0 for the highest, equal ranks for equal scores."""
    order = {score: float(rank) for rank, score in enumerate(sorted(set(scores), reverse=True))}
    return tuple(order[score] for score in scores)
