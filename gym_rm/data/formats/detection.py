"""Find the shape of a row from its fields, and read it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gym_rm.data.formats.fields import margin_of, number
from gym_rm.data.formats.pairs import SIGNED, of_pair, read_binary, read_signed
from gym_rm.data.formats.reply_lists import are_texts, list_field, read_groups, read_list, read_rated
from gym_rm.data.formats.steps import read_steps
from gym_rm.data.formats.transcripts import with_parsed_prompt
from gym_rm.data.rows import filled_fields, show
from gym_rm.errors import ConfigError
from gym_rm.types import Comparison, PreferencePair

EXPECTED = (
    "'chosen' and 'rejected'; a list 'completions', 'solutions' or 'responses'; 'response1', 'response2' and "
    "'overall_preference'; 'response_1', 'response_2' and 'preference_strength'; 'response' with ratings; or "
    "'completions' with 'labels'"
)


def comparison_of_row(row: Any, where: str) -> tuple[str, Comparison]:
    """Return the shape of a row and the row as a comparison.

    Raises:
        ConfigError: the row has no known shape, or a field is invalid.
    """
    if isinstance(row, Comparison):
        return "comparison", _checked(row, where)
    if isinstance(row, PreferencePair):
        return "pair", of_pair(row, where)
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: expected a row with 'chosen' and 'rejected', got {show(row)}.")
    row = with_parsed_prompt(row)
    is_pair = row.get("chosen") is not None and row.get("rejected") is not None
    if row.get("labels") is not None and row.get("completions") is not None and not is_pair:
        return "steps", read_steps(row, where)
    if (name := list_field(row)) is not None:
        return read_list(row, name, where)
    if isinstance(row.get("chosen"), list) and isinstance(row.get("rejected"), list) and are_texts(row["chosen"]):
        return "graded", read_groups(row, where)
    if row.get("chosen") is not None or row.get("rejected") is not None:
        return "binary", read_binary(row, where)
    if any(row.get(name) is not None for names in SIGNED for name in names[:2]):
        return "signed", read_signed(row, where)
    if row.get("response") is not None:
        return "rated", read_rated(row, where)
    raise ConfigError(f"{where}: no replies to compare; expected {EXPECTED}; got the fields {filled_fields(row)}.")


def _checked(given: Comparison, where: str) -> Comparison:
    """Return a comparison that a caller made, after checking that its parts fit together."""
    count = len(given.replies)
    parts = {"ranks": given.ranks, "step_labels": given.step_labels, **given.scores}
    for name, values in parts.items():
        if values is not None and len(values) != count:
            raise ConfigError(f"{where}: {name!r} must have one entry for each of {count} replies, got {len(values)}.")
    for rank in given.ranks or ():
        number(rank, where, "ranks")
    for name, scores in given.scores.items():
        if any(map(math.isinf, scores)):
            raise ConfigError(f"{where}: the scores {name!r} must be finite or NaN, got {scores}.")
    margin_of(given.margin, where)
    return given if given.where else replace(given, where=where)
