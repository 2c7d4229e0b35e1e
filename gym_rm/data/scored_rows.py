"""Read the conversations to score from a row of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gym_rm.data.formats.reply_lists import reply_of_entry
from gym_rm.data.messages import parse_messages
from gym_rm.data.pairs import pairs_of_row
from gym_rm.data.prompts import prompt_of_columns, required_prompt, split_reference
from gym_rm.data.rows import filled_fields, show
from gym_rm.errors import ConfigError
from gym_rm.types import Conversation, Message, Prompt

# Labels of the scores of a row: names for an object of scores, indices for a list, None for a single score.
Labels: TypeAlias = tuple[str, ...] | tuple[int, ...] | None

REPLY_LISTS = ("completions", "solutions", "responses")


@dataclass(frozen=True, slots=True)
class RowToScore:
    """The conversations of a row, and the row as a prompt, for scorers that use its `answer` or its other fields."""

    conversations: tuple[Conversation, ...]
    labels: Labels
    prompt: Prompt


def row_to_score(row: Mapping[str, Any], where: str, index: int = 0) -> RowToScore:
    """Return the conversations of a row, and the labels of their scores.

    The first of these fields that is present is used: a list of replies (`completions`, `solutions` or `responses`),
    `chosen` and `rejected`, `response`, or a whole conversation in `messages`. The other fields (`answer`, ...) become
    a `Prompt`, whose name is the field `prompt_id` or `id`, or else `index`. An assistant turn at the end of the prompt
    is not part of it, as in `load_prompts`: the reply replaces it.

    Raises:
        ConfigError: none of these fields is present, or its value is invalid.
    """
    for name in REPLY_LISTS:
        if row.get(name) is not None:
            replies = row[name]
            if not isinstance(replies, list) or not replies:
                raise ConfigError(f"{where}: {name!r} must be a list of replies, got {show(replies)}.")
            parsed = [_reply(reply, where, f"{name}[{i}]") for i, reply in enumerate(replies)]
            prompt, columns = _prompt_and_columns(row, name, parsed, where)
            every = tuple(prompt + reply for reply in parsed)
            return RowToScore(every, tuple(range(len(every))), prompt_of_columns(prompt, columns, index, where=where))
    if row.get("chosen") is not None or row.get("rejected") is not None:
        judged = {name: row[name] for name in ("margin", "score_chosen", "score_rejected") if name in row}
        pair, *others = pairs_of_row({key: value for key, value in row.items() if key not in judged}, where)
        if others:
            raise ConfigError(f"{where}: 'chosen' and 'rejected' must be one reply each; write more into 'responses'.")
        both = (pair.prompt + pair.chosen, pair.prompt + pair.rejected)
        columns = {**pair.metadata, **judged}
        return RowToScore(both, ("chosen", "rejected"), prompt_of_columns(pair.prompt, columns, index, where=where))
    if row.get("response") is not None:
        reply = _reply(row["response"], where, "response")
        prompt, columns = _prompt_and_columns(row, "response", [reply], where)
        return RowToScore((prompt + reply,), None, prompt_of_columns(prompt, columns, index, where=where))
    if row.get("messages") is not None:
        _, whole = required_prompt(row, where)
        prompt = whole[:-1] if whole[-1]["role"] == "assistant" else whole
        columns = {key: value for key, value in row.items() if key != "messages"}
        return RowToScore((whole,), None, prompt_of_columns(prompt, columns, index, where=where))
    raise ConfigError(
        f"{where}: nothing to score; expected 'messages', or a prompt with 'response', 'chosen' and 'rejected', "
        f"or a list {' / '.join(map(repr, REPLY_LISTS))}; got the fields {filled_fields(row)}. Name "
        "others as in --column prompt=Question --column response=Reply."
    )


def _prompt_and_columns(
    row: Mapping[str, Any], name: str, replies: list[tuple[Message, ...]], where: str
) -> tuple[tuple[Message, ...], dict[str, Any]]:
    """Return the messages that the replies in the field `name` answer, and the other columns."""
    field, messages = required_prompt(row, where)
    columns = {key: value for key, value in row.items() if key not in (field, name)}
    if any(reply[0]["role"] == "assistant" for reply in replies):
        messages, reference = split_reference(messages, where, field)
        columns |= reference
    return messages, columns


def _reply(value: Any, where: str, name: str) -> tuple[Message, ...]:
    if isinstance(value, Mapping):
        return reply_of_entry(value, where, name)
    return parse_messages(value, where, name, text_role="assistant")
