"""Preference pairs: one prompt, the reply that was preferred and the one that was not."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.data.messages import parse_messages
from gym_rm.data.rows import Source, describe_source, rows_of, show
from gym_rm.errors import ConfigError
from gym_rm.types import Message, PreferencePair

PROMPT_FIELDS = ("prompt", "context", "question")


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
        raise ConfigError(f"pairs: {describe_source(source)} holds no rows; expected at least one.")
    return pairs


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
    field = next((name for name in PROMPT_FIELDS if row.get(name) is not None), None)
    if field is not None:
        prompt = parse_messages(row[field], where, field)
        chosen, rejected = _after(prompt, chosen, where, "chosen"), _after(prompt, rejected, where, "rejected")
    else:
        prompt, chosen, rejected = _split_prompt(row, chosen, rejected, where)
    used = {field or "prompt", "chosen", "rejected", "margin"}
    return (PreferencePair(prompt, chosen, rejected, _margin(row, where), _rest(row, used)),)


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
    """What follows the prompt, where `reply` is either only that or the whole conversation."""
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


def _required(row: Mapping[str, Any], field: str, where: str) -> Any:
    if row.get(field) is None:
        raise ConfigError(f"{where}: the field {field!r} is missing, got {sorted(row)}.")
    return row[field]


def _rest(row: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in used}
