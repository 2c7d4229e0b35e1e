"""What rows mean: prompts for episodes, preference pairs, and conversations to score."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from gym_rm.errors import ConfigError
from gym_rm.data.rows import Source, describe, read_rows, rows_of, show
from gym_rm.types import Conversation, Message, PreferencePair, Prompt

__all__ = [
    "Labels",
    "Source",
    "conversations_of_row",
    "load_pairs",
    "load_prompts",
    "pairs_of_row",
    "parse_messages",
    "read_rows",
]

# How the scores of a row are written: one number, an object of these names, or a list.
Labels: TypeAlias = tuple[str, ...] | tuple[int, ...] | None

_REPLY_LISTS = ("completions", "solutions", "responses")
_PROMPTS = ("messages", "prompt", "context", "question")


def load_prompts(source: Source = None, *, limit: int | None = None) -> tuple[Prompt, ...]:
    """Prompts from what a user has.

    Args:
        source: None for the embedded set; a `.jsonl`, `.json`, `.csv` or `.parquet` file (the first three also
            gzipped); a hub data set `"org/name"` or `"org/name:split"` (default split: train; needs the extra
            `data`); or an iterable of texts, message lists, rows and `Prompt`s.
        limit: read the first `limit` rows only.

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
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1 or None for all prompts, got {limit}.")
    rows = itertools.islice(rows_of(source, "prompts"), limit)
    prompts = tuple(_prompt(row, where, index) for index, (where, row) in enumerate(rows))
    if not prompts:
        raise ConfigError(f"prompts: {describe(source)} holds no rows; expected at least one.")
    return prompts


def load_pairs(source: Source) -> tuple[PreferencePair, ...]:
    """Preference pairs from a file, a hub data set or an iterable (see `load_prompts`), in any of these rows.

    - `prompt` (or `context`, `question`), `chosen`, `rejected`: each a text or messages; the latter two may repeat
      the prompt.
    - `chosen`, `rejected` alone: two conversations, whose shared first messages are the prompt; also
      texts in the `"\\n\\nHuman: ...\\n\\nAssistant: ..."` form.
    - `context`, `completions` of `{"rank", "completion"}`: one pair for every two ranks that differ, lower is better.

    `margin`, or else `score_chosen - score_rejected`, becomes the margin. Other fields go to `metadata`.

    Raises:
        ConfigError: a source that cannot be read, no rows, or a bad row (names the file, line and field).

    Example:
        >>> pair, = load_pairs([{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}])
        >>> pair.chosen
        ({'role': 'assistant', 'content': '4'},)
    """
    pairs = tuple(itertools.chain.from_iterable(pairs_of_row(row, where) for where, row in rows_of(source, "pairs")))
    if not pairs:
        raise ConfigError(f"pairs: {describe(source)} holds no rows; expected at least one.")
    return pairs


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


def pairs_of_row(row: Any, where: str) -> tuple[PreferencePair, ...]:
    """The pairs of one row, as `load_pairs` reads it."""
    if isinstance(row, PreferencePair):
        return (row,)
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: expected a row with 'chosen' and 'rejected', got {show(row)}.")
    if row.get("completions") is not None:
        return _ranked_pairs(row, where)
    chosen = _conversation(_required(row, "chosen", where), where, "chosen")
    rejected = _conversation(_required(row, "rejected", where), where, "rejected")
    field = next((name for name in _PROMPTS[1:] if row.get(name) is not None), None)
    if field is not None:
        prompt = parse_messages(row[field], where, field)
        chosen, rejected = _after(prompt, chosen, where, "chosen"), _after(prompt, rejected, where, "rejected")
    else:
        prompt, chosen, rejected = _split_prompt(row, chosen, rejected, where)
    used = {field or "prompt", "chosen", "rejected", "margin"}
    return (PreferencePair(prompt, chosen, rejected, _margin(row, where), _rest(row, used)),)


def conversations_of_row(row: Mapping[str, Any], where: str) -> tuple[tuple[Conversation, ...], Labels]:
    """What a row holds to score, and how its scores are written.

    In this order: a list of replies (`completions`, `solutions` or `responses`), `chosen` and `rejected`,
    `response`, or a whole conversation in `messages`.

    Raises:
        ConfigError: none of these, or one that is malformed.
    """
    for name in _REPLY_LISTS:
        if row.get(name) is not None:
            replies = row[name]
            if not isinstance(replies, list) or not replies:
                raise ConfigError(f"{where}: {name!r} must be a list of replies, got {show(replies)}.")
            prompt = _prompt_messages(row, where)
            conversations = [prompt + _reply(reply, where, f"{name}[{i}]") for i, reply in enumerate(replies)]
            return tuple(conversations), tuple(range(len(replies)))
    if row.get("chosen") is not None or row.get("rejected") is not None:
        (pair,) = pairs_of_row(row, where)
        return (pair.prompt + pair.chosen, pair.prompt + pair.rejected), ("chosen", "rejected")
    if row.get("response") is not None:
        return (_prompt_messages(row, where) + _reply(row["response"], where, "response"),), None
    if row.get("messages") is not None:
        return (parse_messages(row["messages"], where, "messages"),), None
    raise ConfigError(
        f"{where}: nothing to score; expected 'messages', or a prompt with 'response', 'chosen' and 'rejected', "
        f"or a list {' / '.join(map(repr, _REPLY_LISTS))}; got the fields {sorted(row)}."
    )


# --- one row -----------------------------------------------------------------------------------------------------


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
    present = [name for name in _PROMPTS if row.get(name) is not None]
    if not present:
        hint = " A conversation is a list of messages: put it in a list of its own." if "role" in row else ""
        raise ConfigError(
            f"{where}: expected one of the fields 'messages', 'prompt', 'context' or 'question', "
            f"got {sorted(row)}.{hint}"
        )
    if present == ["context", "question"] and isinstance(row["context"], str):
        raise ConfigError(f"{where}: 'context' and 'question' are both texts; join them into one field 'prompt'.")
    return present[0]


def _message(message: Any, where: str, field: str) -> Message:
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where}: {field!r} must be a message {{'role', 'content'}}, got {show(message)}.")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            found = show(message[key]) if key in message else f"only the keys {sorted(message)}"
            raise ConfigError(f"{where}: '{field}.{key}' must be a text, got {found}.")
    # Column formats (parquet, datasets) fill the keys that only other messages have with None.
    return cast(Message, {key: value for key, value in message.items() if value is not None})


def _answer(value: Any, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(f"{where}: 'answer' must be a text or a number, got {show(value)}.")


def _texts(value: Any, where: str, field: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        raise ConfigError(f"{where}: {field!r} must be a list of texts, got {show(value)}.")
    return tuple(value)


def _required(row: Mapping[str, Any], field: str, where: str) -> Any:
    if row.get(field) is None:
        raise ConfigError(f"{where}: the field {field!r} is missing, got {sorted(row)}.")
    return row[field]


def _rest(row: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in used}


def _prompt_messages(row: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    for name in _PROMPTS:
        if row.get(name) is not None:
            return parse_messages(row[name], where, name)
    raise ConfigError(f"{where}: a reply without its prompt; expected one of {_PROMPTS}, got {sorted(row)}.")


def _reply(value: Any, where: str, name: str) -> tuple[Message, ...]:
    if isinstance(value, Mapping):
        for key in ("completion", "text"):
            if value.get(key) is not None:
                return parse_messages(value[key], where, f"{name}.{key}", text_role="assistant")
    return parse_messages(value, where, name, text_role="assistant")


# --- pairs -------------------------------------------------------------------------------------------------------


def _conversation(value: Any, where: str, field: str) -> tuple[Message, ...]:
    """`parse_messages` for a reply, which may also be a whole dialogue in the `Human: / Assistant:` text form."""
    if isinstance(value, str) and value.startswith("\n\nHuman:"):
        turns = re.split(r"\n\n(Human|Assistant):", value)[1:]
        roles = {"Human": "user", "Assistant": "assistant"}
        return tuple(
            {"role": roles[speaker], "content": text.strip()}
            for speaker, text in zip(turns[::2], turns[1::2], strict=True)
        )
    return parse_messages(value, where, field, text_role="assistant")


def _after(prompt: tuple[Message, ...], reply: tuple[Message, ...], where: str, field: str) -> tuple[Message, ...]:
    """What follows the prompt, where `reply` is either that already or the whole conversation."""
    if reply[: len(prompt)] == prompt and len(reply) > len(prompt):
        return reply[len(prompt) :]
    if reply[0]["role"] in ("system", "user"):
        raise ConfigError(
            f"{where}: {field!r} begins with a {reply[0]['role']} turn that is not the prompt's; "
            "expected the reply alone, or the whole conversation with the prompt word for word."
        )
    return reply


def _split_prompt(
    row: Mapping[str, Any], chosen: tuple[Message, ...], rejected: tuple[Message, ...], where: str
) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
    shared = 0
    # Both keep at least one message, also where one conversation is a prefix of the other.
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared:
        raise ConfigError(
            f"{where}: no 'prompt', and 'chosen' and 'rejected' do not begin with the same messages "
            f"({show(row['chosen'])}); add the field 'prompt' or give whole conversations."
        )
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _ranked_pairs(row: Mapping[str, Any], where: str) -> tuple[PreferencePair, ...]:
    context = parse_messages(_required(row, "context", where), where, "context")
    completions = row["completions"]
    if isinstance(completions, str) or not isinstance(completions, Sequence) or len(completions) < 2:
        raise ConfigError(f"{where}: 'completions' must be a list of at least two, got {show(completions)}.")
    ranked = []
    for index, completion in enumerate(completions):
        field = f"completions[{index}]"
        if not isinstance(completion, Mapping) or completion.get("completion") is None:
            raise ConfigError(f"{where}: {field!r} must be {{'rank', 'completion'}}, got {show(completion)}.")
        rank = completion.get("rank")
        if not isinstance(rank, int | float) or isinstance(rank, bool):
            raise ConfigError(f"{where}: '{field}.rank' must be a number, got {show(rank)}.")
        ranked.append(
            (rank, parse_messages(completion["completion"], where, f"{field}.completion", text_role="assistant"))
        )
    ranked.sort(key=lambda entry: entry[0])
    metadata = _rest(row, {"context", "completions"})
    pairs = tuple(
        PreferencePair(context, chosen, rejected, metadata=metadata)
        for (better, chosen), (worse, rejected) in itertools.combinations(ranked, 2)
        if better < worse
    )
    if not pairs:
        raise ConfigError(f"{where}: all completions have the rank {ranked[0][0]}; a pair needs a preference.")
    return pairs


def _margin(row: Mapping[str, Any], where: str) -> float | None:
    value = row.get("margin")
    if value is None and row.get("score_chosen") is not None and row.get("score_rejected") is not None:
        try:
            value = row["score_chosen"] - row["score_rejected"]
        except TypeError as error:
            raise ConfigError(f"{where}: 'score_chosen' and 'score_rejected' must be numbers ({error}).") from error
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
        raise ConfigError(f"{where}: 'margin' must be a number, got {show(value)}.")
    return None if value is None else float(value)
