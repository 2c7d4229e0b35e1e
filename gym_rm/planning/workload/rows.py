"""Measure a user's rows: lengths of prompts and replies, and how much of their beginnings they share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gym_rm import checks
from gym_rm.data.prompts import PROMPT_FIELDS, prompt_field, split_reference
from gym_rm.data.rows import filled_fields, rows_of
from gym_rm.data.scored_rows import row_to_score
from gym_rm.engine.token_tree import TokenSequence, plan_trees
from gym_rm.errors import ConfigError
from gym_rm.planning.quantities import Basis, Quantity
from gym_rm.planning.workload.lengths import Lengths, from_values
from gym_rm.types import Message

MOST_ROWS = 10_000  # rows that are read where no limit is given
MOST_CHARACTERS = 40_000_000  # of the prompts and replies; tokenising them takes about ten seconds
BATCH = 256  # rows that are tokenised at a time
CHARACTERS_PER_TOKEN = 4
REPLIES = ("completions", "solutions", "responses", "chosen", "rejected", "response")

Ids: TypeAlias = NDArray[np.int32]
Messages: TypeAlias = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class RowLengths:
    """What a file of rows measures.

    Attributes:
        rows: rows that were read.
        prompts: tokens of each different prompt.
        replies: tokens of each reply; None if the rows have none.
        replies_per_prompt: mean number of replies to a different prompt; 0 if the rows have none.
        turns: replies in a conversation, with those that its prompt has already and those to `user_turns`.
        shared: share of the prompts' tokens that other prompts begin with too, and that is computed once.
        all_tokens: tokens of all conversations; of all prompts if the rows have no replies.
        unique_tokens: the same, where tokens that conversations begin with together count once.
        notes: what the reader of a plan should know about the measurement.
    """

    rows: int
    prompts: Lengths
    replies: Lengths | None
    replies_per_prompt: float
    turns: Lengths
    shared: Quantity
    all_tokens: int
    unique_tokens: int
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_unique_token(self) -> float:
        """How many times a token of the prefix tree occurs in the conversations."""
        return self.all_tokens / self.unique_tokens


@dataclass(frozen=True, slots=True)
class _Row:
    """Messages of a row: the prompt, and the whole conversation of each reply."""

    where: str
    prompt: Messages
    conversations: tuple[Messages, ...]
    turns: int


def measure_rows(
    path: str, *, tokenizer: str | None, limit: int | None = None, num_prompts: int | None = None
) -> RowLengths:
    """Measure a file of rows.

    A row has a prompt (`messages`, `prompt`, `context` or `question`) and may have replies: `completions`, `solutions`
    or `responses`, `chosen` and `rejected`, `response`, or the last turn of `messages`. Rows with the same prompt count
    as one prompt with several replies. The first 10,000 rows are read, or 40 million characters.

    Args:
        path: file of rows, as for `gym_rm.data.rows.rows_of`.
        tokenizer: folder or hub id of a tokenizer, whose chat template is used; None counts 4 characters as a token.
        limit: maximum number of rows to read; None for 10,000.
        num_prompts: prompts of a step: `shared` is the mean over such groups of prompts in the file's order. None for
            all prompts of the file as one group.

    Raises:
        ConfigError: the file or a row cannot be read, it has no rows, or the tokenizer or its chat template fails.
    """
    most = MOST_ROWS if limit is None else checks.integer("limit", limit, minimum=1)
    rows, notes = _read(path, most)
    encode = _encoder(tokenizer) if tokenizer is not None else _CharacterIds()
    groups: dict[bytes, tuple[Ids, list[Ids]]] = {}
    for batch in (rows[k : k + BATCH] for k in range(0, len(rows), BATCH)):
        messages = [(row.where, row.prompt, True) for row in batch]
        messages += [(row.where, conversation, False) for row in batch for conversation in row.conversations]
        ids = encode(messages)
        whole = iter(ids[len(batch) :])
        for row, prompt in zip(batch, ids, strict=False):
            _, members = groups.setdefault(prompt.tobytes(), (prompt, []))
            members += itertools.islice(whole, len(row.conversations))
    prompts = [prompt for prompt, _ in groups.values()]
    wholes = [whole for _, members in groups.values() for whole in members]
    replies = [max(len(whole) - len(prompt), 0) for prompt, members in groups.values() for whole in members]
    basis, source = Basis.MEASURED, f"measured in {path}"
    if tokenizer is None:
        basis, source = Basis.ASSUMPTION, f"measured in {path}, {CHARACTERS_PER_TOKEN} characters as a token"
    counted = wholes or prompts
    return RowLengths(
        rows=len(rows),
        prompts=from_values([len(prompt) for prompt in prompts], basis=basis, source=source),
        replies=from_values(replies, basis=basis, source=source) if replies else None,
        replies_per_prompt=len(replies) / len(prompts),
        turns=from_values([row.turns for row in rows], basis=Basis.MEASURED, source=f"measured in {path}"),
        shared=Quantity(_shared(prompts, num_prompts), basis, source),
        all_tokens=sum(map(len, counted)),
        unique_tokens=count_unique(counted),
        notes=tuple(notes),
    )


def count_unique(sequences: Sequence[Ids]) -> int:
    """Return the tokens of the prefix tree of all sequences, as the engine builds it."""
    filled = [TokenSequence(ids, np.array([len(ids) - 1])) for ids in sequences if len(ids)]
    total = sum(len(sequence.input_ids) for sequence in filled)
    return plan_trees(filled, max_num_batched_tokens=max(total, 1)).unique_tokens


def _shared(prompts: Sequence[Ids], num_prompts: int | None) -> float:
    """Return the share of the prompts' tokens that is computed once for several prompts of a group."""
    size = num_prompts or len(prompts)
    groups = [prompts[k : k + size] for k in range(0, len(prompts), size)]
    if len(groups) > 1 and len(groups[-1]) < size:
        groups.pop()
    total = sum(len(prompt) for group in groups for prompt in group)
    return 1 - sum(map(count_unique, groups)) / total if total else 0.0


def _read(path: str, most: int) -> tuple[list[_Row], list[str]]:
    """Return the rows, at most so many, and a note if the file has more."""
    rows: list[_Row] = []
    characters = 0
    for index, (where, row) in enumerate(rows_of(path, "rows")):
        if index == most or characters > MOST_CHARACTERS:
            return rows, [f"measured in the first {len(rows):,} rows of {path}, which has more"]
        rows.append(_row(row, where, index))
        texts = itertools.chain(rows[-1].prompt, *rows[-1].conversations)
        characters += sum(len(message["content"]) for message in texts)
    if not rows:
        raise ConfigError(f"rows: {path!r} has no rows; expected at least one.")
    return rows, []


def _row(row: Any, where: str, index: int) -> _Row:
    if not isinstance(row, Mapping):
        row = {"messages": row}
    if any(row.get(name) is not None for name in REPLIES):
        scored = row_to_score(row, where, index)
        conversations = tuple(tuple(each) for each in scored.conversations)
        return _with_turns(where, scored.prompt.messages, conversations, len(scored.prompt.user_turns))
    found = prompt_field(row, where)
    if found is None:
        raise ConfigError(
            f"{where}: expected a prompt in one of the fields {PROMPT_FIELDS}, got the fields {filled_fields(row)}."
        )
    field, messages = found
    prompt, _ = split_reference(messages, where, field)
    turns = row.get("user_turns")
    more = len(turns) if isinstance(turns, list) else 0
    return _with_turns(where, prompt, (messages,) if len(prompt) < len(messages) else (), more)


def _with_turns(where: str, prompt: Messages, conversations: tuple[Messages, ...], more: int) -> _Row:
    before = sum(message["role"] == "assistant" for message in prompt)
    return _Row(where, prompt, conversations, before + 1 + more)


# Messages with their place in the file, and whether a reply comes next.
_Encoder: TypeAlias = Callable[[Sequence[tuple[str, Messages, bool]]], list[Ids]]


class _CharacterIds:
    """Ids of groups of four characters; equal groups have equal ids. Each message begins a new group."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, messages: Sequence[tuple[str, Messages, bool]]) -> list[Ids]:
        return [
            np.array([self._ids.setdefault(piece, len(self._ids)) for piece in _pieces(each)], dtype=np.int32)
            for _, each, _ in messages
        ]


def _pieces(messages: Messages) -> Iterator[str]:
    """Yield groups of four characters of each message and the name of its role, which stands for a template."""
    for message in messages:
        text = f"{message['role']}: {message['content']}\n"
        yield from (text[k : k + CHARACTERS_PER_TOKEN] for k in range(0, len(text), CHARACTERS_PER_TOKEN))


def _encoder(source: str) -> _Encoder:
    """Return a function that renders messages with a tokenizer's template and returns their ids."""
    from gym_rm.engine.text.tokenizers import load_tokenizer  # loads torch

    tokenizer = load_tokenizer(source)

    def text(where: str, messages: Messages, reply_next: bool) -> str:
        if tokenizer.chat_template is None:
            return "\n".join(message["content"] for message in messages)
        try:
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=reply_next))
        except Exception as error:  # templates raise what they like
            raise ConfigError(
                f"{where}: the chat template of {source!r} fails: {error}. Leave the tokenizer out to count "
                f"{CHARACTERS_PER_TOKEN} characters as a token."
            ) from error

    def encode(messages: Sequence[tuple[str, Messages, bool]]) -> list[Ids]:
        texts = [text(*each) for each in messages]
        special = tokenizer.chat_template is None
        try:
            found = tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
        except Exception as error:  # such as for a lone surrogate
            raise ConfigError(f"{messages[0][0]} or a row after it cannot be tokenised: {error}.") from error
        return [np.array(ids, dtype=np.int32) for ids in found]

    return encode
