"""Read prompts, the data rows that episodes start from."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gym_rm.checks import integer
from gym_rm.data.messages import check_encodable, parse_messages
from gym_rm.data.responses_api import chat_row
from gym_rm.data.rows import Source, describe_source, filled_fields, present, rows_of, show
from gym_rm.data.tools import canonical_tools
from gym_rm.errors import ConfigError
from gym_rm.plain_values import to_plain
from gym_rm.types import Message, Prompt

PROMPT_FIELDS = ("messages", "prompt", "context", "question")


def load_prompts(
    source: Source = None, *, limit: int | None = None, max_text_length: int | None = None
) -> tuple[Prompt, ...]:
    """Load prompts from a file, a hub data set or an iterable.

    Args:
        source: None for the embedded set, `"embedded:code"` for the embedded tasks with tests; a `.jsonl`, `.ndjson`,
            `.json`, `.csv` or `.parquet` file (all but the last also compressed as `.gz`) or a pipe of JSON lines; a
            hub data set `"org/name"` or `"org/name:split"` (default split: train; needs the extra `data`); a DataFrame;
            or an iterable of texts, message lists, rows and `Prompt`s, but not a set, which has no order.
        limit: maximum number of rows to read; None for all.
        max_text_length: maximum characters of a message; None for no limit.

    A row has these fields:

    - `messages`, `prompt` (text or messages), `context` or `question`: the conversation. If several are present, the
      first one is used. `messages` and `prompt` must agree; beside them, `context` and `question` go to `metadata`.
      A `context` and another `question` without a `prompt` are an error, because one of them would be lost.
    - `responses_create_params` (instead of these, in rows of NeMo Gym): its `input` and `tools`. The answer is then
      `expected_answer`, `answer` or `ground_truth`.
    - `user_turns`: the messages of the user after the first, second, ... reply.
    - `answer`: the reference answer, a text or a number. A value of another type goes to `metadata`.
    - `tools`: schemas of the tools that the policy may call, a list or its JSON text, see `canonical_tools`.
    - `prompt_id` or `id`: the name of the prompt. The default is the index of the row.
    - All other fields go to `metadata`.

    Column formats (Parquet, `datasets`, DataFrames) give nested mappings the keys of other rows with None. None of a
    nested key is dropped there and kept in JSON lines; columns also have one order of keys for all rows.

    If the messages end with an assistant turn, this turn is the reference reply. It goes to
    `metadata["reference_reply"]`, and the policy answers the messages before it.

    Raises:
        ConfigError: the source cannot be read, it has no rows, or a row is invalid. The message has the file and line.

    Example:
        >>> load_prompts(["What is 2 + 2?"])[0].messages
        ({'role': 'user', 'content': 'What is 2 + 2?'},)
    """
    rows = itertools.islice(rows_of(source, "prompts"), None if limit is None else integer("limit", limit, minimum=1))
    prompts = []
    for index, (where, row) in enumerate(rows):
        prompts.append(_prompt(row, where, index))
        _check_texts(prompts[-1], where, max_text_length)
    if not prompts:
        raise ConfigError(f"prompts: {describe_source(source)} has no rows; expected at least one.")
    return tuple(prompts)


def prompt_of_columns(
    messages: Sequence[Message],
    columns: Mapping[str, Any],
    index: int | str | None,
    *,
    answer_column: str = "answer",
    where: str | None = None,
) -> Prompt:
    """Create the prompt of one row from its messages and its other columns.

    Args:
        messages: the conversation that the policy answers.
        columns: the other columns. `answer_column` becomes the reference answer if it is a text or a number,
            `user_turns` the messages of the scripted user, `tools` the tools of the policy, and `prompt_id` or `id`
            the name. All others go to `metadata`.
        index: name of the prompt if the columns have none; None for one that is equal for equal messages.
        answer_column: name of the column with the reference answer.
        where: file and line, for error messages.

    Raises:
        ConfigError: `user_turns` is not a list of texts, or `tools` not one of tool schemas.
    """
    given = [columns[key] for key in ("prompt_id", "id") if present(columns.get(key)) is not None]
    name = given[0] if given else name_of(messages) if index is None else index
    answer = answer_text(columns.get(answer_column))
    turns = _texts(present(columns.get("user_turns")), where or f"row {index}", "user_turns")
    tools = canonical_tools(present(columns.get("tools")), f"{where or f'row {index}'}: tools")
    used = {"prompt_id", "id", "user_turns", "tools", *([answer_column] if answer is not None else [])}
    metadata = {key: value for key, value in columns.items() if key not in used}
    return Prompt(tuple(messages), str(name), turns, answer, metadata, tools)


def name_of(messages: Any) -> str:
    """Return a name that is equal for equal messages."""
    return hashlib.sha256(json.dumps(to_plain(messages), sort_keys=True, default=str).encode()).hexdigest()[:16]


def answer_text(value: Any) -> str | None:
    """Return a reference answer as text. A number is converted to text, 4.0 to "4".

    Returns None for a missing answer (None, NaN, an empty text) and for a value of another type.
    """
    if isinstance(value, str):
        return value or None
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float | np.floating) and math.isfinite(value):
        return str(int(value)) if value == int(value) else str(value)
    return None


def _prompt(row: Any, where: str, index: int) -> Prompt:
    if isinstance(row, Prompt):
        return row
    if not isinstance(row, Mapping):
        row = {"messages": row}
    kept: Mapping[str, Any] = {}
    if "responses_create_params" in row:
        kept, row = row, chat_row(row, where)  # a resources server gets all fields back, also those that are read here
    field, messages = required_prompt(row, where)
    columns = {key: value for key, value in row.items() if key != field}
    if present(row.get("answer")) in (None, ""):
        columns.pop("answer", None)
    messages, reference = split_reference(messages, where, field)
    columns |= reference
    prompt = prompt_of_columns(messages, columns, index, where=where)
    return dataclasses.replace(prompt, metadata={**prompt.metadata, **kept}) if kept else prompt


def prompt_field(
    row: Mapping[str, Any], where: str, fields: Sequence[str] = PROMPT_FIELDS
) -> tuple[str, tuple[Message, ...]] | None:
    """Return the name and the messages of the prompt; None if the row has none of the fields.

    The prompt is in the first of the fields that is not empty. `context` and `question` are columns like any other
    beside `messages` or `prompt`, and beside each other if they are neither a text nor messages.

    Raises:
        ConfigError: the value is not a prompt, or another prompt has a text that is neither a message of the first one
            nor the end of one.
    """
    present = {name: row[name] for name in fields if row.get(name) is not None}
    filled = {name: value for name, value in present.items() if value not in ("", [])} or present
    explicit = [name for name in filled if name in ("messages", "prompt")]
    names = explicit or [name for name, value in filled.items() if _may_be_prompt(value)] or list(filled)
    if not names:
        return None
    (first, messages), *others = ((name, parse_messages(row[name], where, name)) for name in names)
    texts = [_words(message) for message in messages]
    for other, repeated in others:
        if repeated[-1]["role"] == "assistant":
            repeated = repeated[:-1]  # a reference reply
        if not all(any(text.endswith(_words(message)) for text in texts) for message in repeated):
            raise ConfigError(
                f"{where}: {first!r} and {other!r} are different, and only one of them can be the prompt. Join them "
                f"into one field 'prompt', or rename the one that is not part of it; {other!r} is {show(row[other])}."
            )
    return first, messages


def _may_be_prompt(value: Any) -> bool:
    """Return whether a value is a text or a list that begins with a message."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return isinstance(value, str) or (is_list and bool(value) and isinstance(value[0], Mapping) and "role" in value[0])


def _words(message: Message) -> str:
    return " ".join(message["content"].split())


def split_reference(
    messages: tuple[Message, ...], where: str, field: str
) -> tuple[tuple[Message, ...], dict[str, str]]:
    """Return the messages without an assistant turn at their end, and this turn as `{"reference_reply": text}`.

    Raises:
        ConfigError: no message to answer is before this turn.
    """
    if messages[-1]["role"] != "assistant":
        return messages, {}
    if len(messages) < 2 or messages[-2]["role"] == "assistant":
        raise ConfigError(f"{where}: {field!r} must have a message to answer before its last assistant turn.")
    return messages[:-1], {"reference_reply": messages[-1]["content"]}


def required_prompt(row: Mapping[str, Any], where: str) -> tuple[str, tuple[Message, ...]]:
    """Return the name and the messages of the prompt of a row. Raises ConfigError if it has none."""
    found = prompt_field(row, where)
    if found is None:
        hint = " If the row is one message, pass its conversation as a list of messages." if "role" in row else ""
        raise ConfigError(
            f"{where}: expected one of the fields 'messages', 'prompt', 'context' or 'question', "
            f"got the fields {filled_fields(row)}.{hint}"
        )
    return found


def _check_texts(prompt: Prompt, where: str, max_text_length: int | None) -> None:
    """Raise ConfigError for a text that is too long or that UTF-8 cannot encode."""
    texts = {f"messages[{k}].content": message["content"] for k, message in enumerate(prompt.messages)}
    for field, text in {**texts, **{f"user_turns[{k}]": text for k, text in enumerate(prompt.user_turns)}}.items():
        if max_text_length is not None and len(text) > max_text_length:
            raise ConfigError(
                f"{where}: {field!r} has {len(text)} characters, more than max_text_length={max_text_length}; shorten "
                "it, or increase max_text_length."
            )
        check_encodable(text, where, repr(field))


def _texts(value: Any, where: str, field: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        raise ConfigError(f"{where}: {field!r} must be a list of texts, got {show(value)}.")
    return tuple(value)
