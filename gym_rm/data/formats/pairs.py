"""Rows with two replies: `chosen` and `rejected`, or `response1` and `response2` with a preference."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from gym_rm.data.formats.fields import (
    ALL_PROMPT_FIELDS,
    Messages,
    answered,
    is_whole,
    margin_of,
    number,
    parse_reply,
    required,
    required_prompt,
    rest,
    source_of,
)
from gym_rm.data.formats.transcripts import parse_transcript
from gym_rm.data.prompts import prompt_field
from gym_rm.data.rows import show
from gym_rm.errors import ConfigError
from gym_rm.types import Comparison, PreferencePair

STRONGEST = 3  # absolute value of a signed preference
SIGNED = (("response1", "response2", "overall_preference"), ("response_1", "response_2", "preference_strength"))


def read_binary(row: Mapping[str, Any], where: str) -> Comparison:
    """Read a row with `chosen` and `rejected`: replies to `prompt`, two whole conversations, or two whole texts.

    Without a prompt, texts are divided after the words that they share, as TRL does. The margin is `margin`, or else
    `score_chosen - score_rejected`.
    """
    row = with_shared_prompt(row)
    chosen = parse_reply(required(row, "chosen", where), where, "chosen")
    rejected = parse_reply(required(row, "rejected", where), where, "rejected")
    whole = is_whole(chosen) and is_whole(rejected)
    # Beside whole conversations, `messages` is one of them again, and not their prompt.
    fields = (*ALL_PROMPT_FIELDS[1:], *(() if is_whole(chosen) else ALL_PROMPT_FIELDS[:1]))
    named = prompt_field(row, where, fields)
    field, prompt = named or ("prompt", ())
    replies: tuple[Messages, ...]
    reference: dict[str, str] = {}
    if whole or named is None:
        prompt, replies = _split_shared(row, chosen, rejected, prompt, where)
    else:
        prompt, replies, reference = answered(prompt, (chosen, rejected), ("chosen", "rejected"), where, field)
    scores = {}
    if row.get("score_chosen") is not None and row.get("score_rejected") is not None:
        scores["score"] = (
            number(row["score_chosen"], where, "score_chosen"),
            number(row["score_rejected"], where, "score_rejected"),
        )
    margin = margin_of(row.get("margin"), where)
    if scores:
        shown = "score_chosen {:g} - score_rejected {:g}".format(*scores["score"])
        difference = margin_of(scores["score"][0] - scores["score"][1], where, shown)
        margin = difference if margin is None else margin
    metadata = {**rest(row, field, "chosen", "rejected", "margin"), **reference}
    return Comparison(prompt, replies, (0.0, 1.0), margin, scores, None, source_of(row), where, metadata)


def read_signed(row: Mapping[str, Any], where: str) -> Comparison:
    """Read a row with two replies and a preference between -3 (the first reply is much better) and 3.

    It has `response1`, `response2` and `overall_preference` (HelpSteer3, arXiv 2505.11475), or `response_1`,
    `response_2` and `preference_strength` (HelpSteer2, arXiv 2410.01257). The preference 0 is a tie; its absolute value
    is the margin.
    """
    *names, preferred = next(each for each in SIGNED if row.get(each[0]) is not None or row.get(each[1]) is not None)
    field, prompt = required_prompt(row, where, "context" if preferred == "overall_preference" else "prompt")
    replies = [parse_reply(required(row, name, where), where, name) for name in names]
    prompt, kept, reference = answered(prompt, replies, names, where, field)
    ranks, margin = None, None
    if row.get(preferred) is not None:
        preference = number(row[preferred], where, preferred)
        if abs(preference) > STRONGEST:
            raise ConfigError(
                f"{where}: {preferred!r} must be between -{STRONGEST} (the first reply is better) and "
                f"{STRONGEST}, got {preference:g}."
            )
        ranks, margin = (float(preference > 0), float(preference < 0)), abs(preference)
    metadata = {**rest(row, field, *names, preferred), **reference}
    return Comparison(prompt, kept, ranks, margin, {}, None, source_of(row), where, metadata)


def of_pair(pair: PreferencePair, where: str) -> Comparison:
    """Return a preference pair as a comparison."""
    margin = margin_of(pair.margin, where)
    replies, source = (pair.chosen, pair.rejected), source_of(pair.metadata)
    return Comparison(pair.prompt, replies, (0.0, 1.0), margin, {}, None, source, where, pair.metadata)


def with_shared_prompt(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row without a prompt whose replies are texts with the words at their start that they share as `prompt`.

    Example:
        >>> with_shared_prompt({"chosen": "The sky is blue.", "rejected": "The sky is black."})
        {'chosen': ' blue.', 'rejected': ' black.', 'prompt': 'The sky is'}
    """
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if any(row.get(name) is not None for name in ALL_PROMPT_FIELDS) or parse_transcript(chosen) is not None:
        return row
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        return row
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    shared = "".join(character for character, _ in equal)
    prompt = shared[: len(shared) - len(re.split(r"\s", shared)[-1])].removesuffix(" ")  # it ends with a whole word
    if not prompt.strip():
        return row
    return {**row, "chosen": chosen[len(prompt) :], "rejected": rejected[len(prompt) :], "prompt": prompt}


def _split_shared(
    row: Mapping[str, Any], chosen: Messages, rejected: Messages, prompt: Messages, where: str
) -> tuple[Messages, tuple[Messages, ...]]:
    """Return the messages that two conversations share at the start, and those after them in each.

    Raises:
        ConfigError: they share none, or the field `prompt` has a text that is not in them.
    """
    shared = 0
    # Each reply keeps at least one message, even if one conversation is a prefix of the other.
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared:
        raise ConfigError(
            f"{where}: the field 'prompt' is missing, and 'chosen' and 'rejected' do not begin with the same message; "
            f"add the field 'prompt' or give whole conversations. 'chosen' is {show(row['chosen'])}."
        )
    texts = [" ".join(message["content"].split()) for message in chosen[:shared]]
    for message in prompt:
        if not any(text.endswith(" ".join(message["content"].split())) for text in texts):
            raise ConfigError(
                f"{where}: 'chosen' and 'rejected' are whole conversations, but the messages at their start, which "
                f"they share, do not contain the prompt {show(message['content'])}; remove the prompt or correct it."
            )
    return chosen[:shared], (chosen[shared:], rejected[shared:])
