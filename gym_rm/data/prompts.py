"""Read prompts, the data rows that episodes start from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gym_rm.checks import integer
from gym_rm.data.messages import parse_messages
from gym_rm.data.rows import Source, describe_source, rows_of, show
from gym_rm.errors import ConfigError
from gym_rm.types import Message, Prompt

_FIELDS = ("messages", "prompt", "context", "question")


def load_prompts(source: Source = None, *, limit: int | None = None) -> tuple[Prompt, ...]:
    """Load prompts from a file, a hub data set or an iterable.

    Args:
        source: None for the embedded set; a `.jsonl`, `.json`, `.csv` or `.parquet` file (the first three also
            gzipped); a hub data set `"org/name"` or `"org/name:split"` (default split: train; needs the extra
            `data`); or an iterable of texts, message lists, rows and `Prompt`s.
        limit: maximum number of rows to read; None for all.

    A row has these fields:

    - `messages`, `prompt` (text or messages), `context` or `question`: the conversation. The first one present is used.
    - `user_turns`: the messages of the user after the first, second, ... reply.
    - `answer`: the reference answer.
    - `prompt_id` or `id`: the name of the prompt. The default is the index of the row.
    - All other fields go to `metadata`.

    If the messages end with an assistant turn, this turn is the reference reply. It goes to
    `metadata["reference_reply"]`, and the policy answers the messages before it.

    Raises:
        ConfigError: the source cannot be read, it has no rows, or a row is invalid.

    Example:
        >>> load_prompts(["What is 2 + 2?"])[0].messages
        ({'role': 'user', 'content': 'What is 2 + 2?'},)
    """
    rows = itertools.islice(rows_of(source, "prompts"), None if limit is None else integer("limit", limit, minimum=1))
    prompts = tuple(_prompt(row, where, index) for index, (where, row) in enumerate(rows))
    if not prompts:
        raise ConfigError(f"prompts: {describe_source(source)} has no rows; expected at least one.")
    return prompts


def prompt_of_columns(
    messages: Sequence[Message],
    columns: Mapping[str, Any],
    index: int | str,
    *,
    answer_column: str = "answer",
    where: str | None = None,
) -> Prompt:
    """Create the prompt of one row from its messages and its other columns.

    Args:
        messages: the conversation that the policy answers.
        columns: the other columns. `answer_column` becomes the reference answer if it is a text or a number,
            `user_turns` the messages of the scripted user, and `prompt_id` or `id` the name. All others go to
            `metadata`.
        index: name of the prompt if the columns have none.
        answer_column: name of the column with the reference answer.
        where: file and line, for error messages.

    Raises:
        ConfigError: `user_turns` is not a list of texts.
    """
    name = next((columns[key] for key in ("prompt_id", "id") if columns.get(key) is not None), index)
    answer = answer_text(columns.get(answer_column))
    turns = _texts(columns.get("user_turns"), where or f"row {index}", "user_turns")
    used = {"prompt_id", "id", "user_turns", *([answer_column] if answer is not None else [])}
    metadata = {key: value for key, value in columns.items() if key not in used}
    return Prompt(tuple(messages), str(name), turns, answer, metadata)


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
    field = _prompt_field(row, where)
    messages = parse_messages(row[field], where, field)
    columns = {key: value for key, value in row.items() if key not in (field, "answer")}
    if messages[-1]["role"] == "assistant":
        columns["reference_reply"] = messages[-1]["content"]
        messages = messages[:-1]
        if not messages or messages[-1]["role"] == "assistant":
            raise ConfigError(f"{where}: {field!r} must have a message to answer before its last assistant turn.")
    answer = _answer(row.get("answer"), where)
    return prompt_of_columns(messages, {**columns, "answer": answer} if answer else columns, index, where=where)


def _prompt_field(row: Mapping[str, Any], where: str) -> str:
    present = [name for name in _FIELDS if row.get(name) is not None]
    if not present:
        hint = " If the row is one message, pass its conversation as a list of messages." if "role" in row else ""
        raise ConfigError(
            f"{where}: expected one of the fields 'messages', 'prompt', 'context' or 'question', "
            f"got the fields {sorted(row)}.{hint}"
        )
    if present == ["context", "question"] and isinstance(row["context"], str):
        raise ConfigError(f"{where}: 'context' and 'question' are both texts; join them into one field 'prompt'.")
    return present[0]


def _answer(value: Any, where: str) -> str | None:
    text = answer_text(value)
    missing = value is None or value == "" or (isinstance(value, float) and math.isnan(value))
    if text is None and not missing:
        raise ConfigError(f"{where}: 'answer' must be a text or a number, got {show(value)}.")
    return text


def _texts(value: Any, where: str, field: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        raise ConfigError(f"{where}: {field!r} must be a list of texts, got {show(value)}.")
    return tuple(value)
