"""Prompts: the rows that episodes start from."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.checks import integer
from gym_rm.data.messages import parse_messages
from gym_rm.data.rows import Source, describe_source, rows_of, show
from gym_rm.errors import ConfigError
from gym_rm.types import Message, Prompt

_FIELDS = ("messages", "prompt", "context", "question")


def load_prompts(source: Source = None, *, limit: int | None = None) -> tuple[Prompt, ...]:
    """Prompts from what a user has.

    Args:
        source: None for the embedded set; a `.jsonl`, `.json`, `.csv` or `.parquet` file (the first three also
            gzipped); a hub data set `"org/name"` or `"org/name:split"` (default split: train; needs the extra
            `data`); or an iterable of texts, message lists, rows and `Prompt`s.
        limit: read the first `limit` rows only; None for all.

    A row holds its conversation in `messages`, `prompt` (text or messages), `context` or `question`, in this order
    of preference; what the user says next in `user_turns`, a reference in `answer`, a name in `prompt_id` or `id`
    (default: its index). Other fields go to `metadata`. Where the messages end with an assistant turn, that
    turn is the reference reply: it moves to `metadata["reference_reply"]` and the policy answers what came before.

    Raises:
        ConfigError: a source that cannot be read, no rows, or a bad row (names the file, line and field).

    Example:
        >>> load_prompts(["What is 2 + 2?"])[0].messages
        ({'role': 'user', 'content': 'What is 2 + 2?'},)
    """
    rows = itertools.islice(rows_of(source, "prompts"), None if limit is None else integer("limit", limit, minimum=1))
    prompts = tuple(_prompt(row, where, index) for index, (where, row) in enumerate(rows))
    if not prompts:
        raise ConfigError(f"prompts: {describe_source(source)} holds no rows; expected at least one.")
    return prompts


def prompt_of_columns(messages: Sequence[Message], columns: Mapping[str, Any], index: int) -> Prompt:
    """The prompt of one row as a trainer holds it: its messages, and the other columns of the data set.

    `answer` becomes the reference answer if it is a text or a number, `prompt_id` or `id` the name; all other columns
    go to `metadata` under their own names.
    """
    name = next((columns[key] for key in ("prompt_id", "id") if columns.get(key) is not None), index)
    answer = answer_text(columns.get("answer"))
    used = {"prompt_id", "id", *(["answer"] if answer is not None else [])}
    metadata = {key: value for key, value in columns.items() if key not in used}
    return Prompt(tuple(messages), str(name), answer=answer, metadata=metadata)


def answer_text(value: Any) -> str | None:
    """A reference answer as text: a text as it is, a number written out, None for anything else."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _prompt(row: Any, where: str, index: int) -> Prompt:
    if isinstance(row, Prompt):
        return row
    if not isinstance(row, Mapping):
        row = {"messages": row}
    field = _prompt_field(row, where)
    messages = parse_messages(row[field], where, field)
    metadata = _rest(row, {field, "answer", "prompt_id", "id", "user_turns"})
    if messages[-1]["role"] == "assistant":
        metadata["reference_reply"] = messages[-1]["content"]
        messages = messages[:-1]
        if not messages or messages[-1]["role"] == "assistant":
            raise ConfigError(f"{where}: {field!r} leaves nothing to answer once its last assistant turn is taken off.")
    name = next((row[key] for key in ("prompt_id", "id") if row.get(key) is not None), index)
    turns = row.get("user_turns")
    return Prompt(messages, str(name), _texts(turns, where, "user_turns"), _answer(row.get("answer"), where), metadata)


def _prompt_field(row: Mapping[str, Any], where: str) -> str:
    present = [name for name in _FIELDS if row.get(name) is not None]
    if not present:
        hint = " A conversation is a list of messages: put it in a list of its own." if "role" in row else ""
        raise ConfigError(
            f"{where}: expected one of the fields 'messages', 'prompt', 'context' or 'question', "
            f"got {sorted(row)}.{hint}"
        )
    if present == ["context", "question"] and isinstance(row["context"], str):
        raise ConfigError(f"{where}: 'context' and 'question' are both texts; join them into one field 'prompt'.")
    return present[0]


def _answer(value: Any, where: str) -> str | None:
    if value is None or (text := answer_text(value)) is not None:
        return None if value is None else text
    raise ConfigError(f"{where}: 'answer' must be a text or a number, got {show(value)}.")


def _texts(value: Any, where: str, field: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        raise ConfigError(f"{where}: {field!r} must be a list of texts, got {show(value)}.")
    return tuple(value)


def _rest(row: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in used}
