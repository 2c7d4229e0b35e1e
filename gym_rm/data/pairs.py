"""Read preference pairs: a prompt with a preferred and a rejected reply."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.data.messages import parse_messages
from gym_rm.data.prompts import PROMPT_FIELDS, prompt_field, split_reference
from gym_rm.data.rows import Source, describe_source, filled_fields, rows_of, show
from gym_rm.errors import ConfigError
from gym_rm.types import Message, PreferencePair


def load_pairs(source: Source) -> tuple[PreferencePair, ...]:
    """Load preference pairs from a file, a hub data set or an iterable (see `load_prompts`).

    A row has one of these forms:

    - `prompt` (or `context`, `question`, `messages`), `chosen`, `rejected`: each a text or messages. `chosen` and
      `rejected` may repeat the prompt.
    - `chosen`, `rejected` alone: two conversations, each messages or a text in the form
      `"\\n\\nHuman: ...\\n\\nAssistant: ..."`. The messages that they share at the start are the prompt.
    - `context`, `completions` of `{"rank", "completion"}`: one pair for every two completions with different ranks.
      The lower rank is better.

    The margin is `margin`, or else `score_chosen - score_rejected`. Other fields go to `metadata`.

    Raises:
        ConfigError: the source cannot be read, it has no rows, or a row is invalid.

    Example:
        >>> pair, = load_pairs([{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}])
        >>> pair.chosen
        ({'role': 'assistant', 'content': '4'},)
    """
    pairs = tuple(itertools.chain.from_iterable(pairs_of_row(row, where) for where, row in rows_of(source, "pairs")))
    if not pairs:
        raise ConfigError(f"pairs: {describe_source(source)} has no rows; expected at least one.")
    return pairs


def pairs_of_row(row: Any, where: str) -> tuple[PreferencePair, ...]:
    """Return the pairs of one row, in any form that `load_pairs` reads."""
    if isinstance(row, PreferencePair):
        return (row,)
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: expected a row with 'chosen' and 'rejected', got {show(row)}.")
    if row.get("completions") is not None:
        return _ranked_pairs(row, where)
    chosen = _conversation(_required(row, "chosen", where), where, "chosen")
    rejected = _conversation(_required(row, "rejected", where), where, "rejected")
    # Beside whole conversations, `messages` is one of them again, and not their prompt.
    whole = chosen[0]["role"] in ("system", "user")
    reference: dict[str, str] = {}
    named = prompt_field(row, where, PROMPT_FIELDS[1:] if whole else (*PROMPT_FIELDS[1:], PROMPT_FIELDS[0]))
    if named is not None:
        field, prompt = named
        if "assistant" in (chosen[0]["role"], rejected[0]["role"]):
            prompt, reference = split_reference(prompt, where, field)
        chosen, rejected = _after(prompt, chosen, where, "chosen"), _after(prompt, rejected, where, "rejected")
    else:
        field = "prompt"
        prompt, chosen, rejected = _split_prompt(row, chosen, rejected, where)
    used = {field, "chosen", "rejected", "margin"}
    return (PreferencePair(prompt, chosen, rejected, _margin(row, where), {**_rest(row, used), **reference}),)


def _conversation(value: Any, where: str, field: str) -> tuple[Message, ...]:
    """Parse a reply, or a whole dialogue in the text form `Human: / Assistant:`."""
    if isinstance(value, str) and value.startswith("\n\nHuman:"):
        turns = re.split(r"\n\n(Human|Assistant):", value)[1:]
        roles = {"Human": "user", "Assistant": "assistant"}
        return tuple(
            {"role": roles[speaker], "content": text.strip()}
            for speaker, text in zip(turns[::2], turns[1::2], strict=True)
        )
    return parse_messages(value, where, field, text_role="assistant")


def _after(prompt: tuple[Message, ...], reply: tuple[Message, ...], where: str, field: str) -> tuple[Message, ...]:
    """Return the messages after the prompt; `reply` is either these messages or the whole conversation."""
    if reply[: len(prompt)] == prompt and len(reply) > len(prompt):
        return reply[len(prompt) :]
    if reply[0]["role"] in ("system", "user"):
        raise ConfigError(
            f"{where}: {field!r} begins with a {reply[0]['role']} turn that is not in the prompt; "
            "expected only the reply, or the whole conversation with exactly the same prompt."
        )
    return reply


def _split_prompt(
    row: Mapping[str, Any], chosen: tuple[Message, ...], rejected: tuple[Message, ...], where: str
) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
    shared = 0
    # Each reply keeps at least one message, even if one conversation is a prefix of the other.
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared:
        raise ConfigError(
            f"{where}: the field 'prompt' is missing, and 'chosen' and 'rejected' do not begin with the same message; "
            f"add the field 'prompt' or give whole conversations. 'chosen' is {show(row['chosen'])}."
        )
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _ranked_pairs(row: Mapping[str, Any], where: str) -> tuple[PreferencePair, ...]:
    name, context = prompt_field(row, where) or ("context", _required(row, "context", where))
    context, reference = split_reference(context, where, name)
    completions = row["completions"]
    if isinstance(completions, str) or not isinstance(completions, Sequence) or len(completions) < 2:
        raise ConfigError(
            f"{where}: 'completions' must be a list of at least two completions, got {show(completions)}."
        )
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
    metadata = {**_rest(row, {name, "completions"}), **reference}
    pairs = tuple(
        PreferencePair(context, chosen, rejected, metadata=metadata)
        for (better, chosen), (worse, rejected) in itertools.combinations(ranked, 2)
        if better < worse
    )
    if not pairs:
        raise ConfigError(f"{where}: all completions have the rank {ranked[0][0]}; a pair needs two different ranks.")
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
        raise ConfigError(f"{where}: the field {field!r} is missing, got the fields {filled_fields(row)}.")
    return row[field]


def _rest(row: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in used}
