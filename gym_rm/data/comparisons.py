"""Read comparisons of replies, for training and evaluating reward models, from every shape of row."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gym_rm.checks import one_of
from gym_rm.data.columns import check_fields, with_columns
from gym_rm.data.findings import grouped
from gym_rm.data.formats.detection import comparison_of_row
from gym_rm.data.messages import check_encodable
from gym_rm.data.rows import Source, describe_source, present, rows_or_errors
from gym_rm.data.tools import canonical_tools
from gym_rm.errors import ConfigError
from gym_rm.types import Comparison, Prompt


@dataclass(frozen=True, slots=True)
class DroppedRow:
    """A row that is not used.

    Attributes:
        where: file and line of the row.
        reason: why it is not used.
    """

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class ComparisonSet:
    """The comparisons of one source.

    Attributes:
        name: name of the set, for metrics.
        comparisons: the rows that are used, in the order of the source.
        dropped: the rows that are not used, in the order of the source.
        shapes: number of rows of each shape among `comparisons`.

    Example:
        >>> found = load_comparisons([{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}])
        >>> found.comparisons[0].ranks, len(found.dropped), found.shapes
        ((0.0, 1.0), 0, {'binary': 1})
    """

    name: str
    comparisons: tuple[Comparison, ...]
    dropped: tuple[DroppedRow, ...] = ()
    shapes: Mapping[str, int] = field(default_factory=dict)


def load_comparisons(
    source: Source,
    *,
    name: str = "",
    on_error: Literal["raise", "drop"] = "raise",
    columns: Mapping[str, str] | None = None,
) -> ComparisonSet:
    """Load comparisons from a file, a hub data set or an iterable (see `load_prompts`).

    The shape of each row is found from its fields, so a file may have several:

    - `prompt` (or `context`, `question`, `messages`, `instruction`, `input`), `chosen`, `rejected`, each a text or
      messages; `chosen` and `rejected` may be whole conversations, also as a transcript
      `"\\n\\nHuman: ...\\n\\nAssistant: ..."`, or whole texts, of which the words that they share are the prompt.
    - a prompt and a list `completions`, `solutions` or `responses` of replies with `rank` (lower is better),
      `correct`, or `overall_score` or `score` (higher is better), and ratings by objective in `annotations`.
    - `context`, `response1`, `response2`, `overall_preference` from -3 (the first is better) to 3; 0 is a tie; or
      `prompt`, `response_1`, `response_2`, `preference_strength`.
    - `prompt`, `response` and ratings such as `helpfulness`.
    - `prompt`, `completions` (the steps of one reply) and `labels`.
    - `Comparison` and `PreferencePair` objects.

    A field `tools` (see `load_prompts`) is given to the chat template, in training as in scoring.

    A row is dropped, and counted in `dropped`, if a reply is empty, if all replies are equal, or if neither a
    preference nor a rating nor a label is known.

    Args:
        source: the file, data set or iterable.
        name: name of the set; empty for the name of the source.
        on_error: raise an error for a malformed row, or drop it.
        columns: columns that have other names, as in `{"prompt": "Question"}`.

    Raises:
        ConfigError: the source cannot be read, it has no rows, all rows are dropped, or a row is malformed: the message
            has the file, the line, what was expected and what was found.

    Example:
        >>> row = {"context": "2 + 2?", "response1": "4", "response2": "5", "overall_preference": -2}
        >>> found = load_comparisons([row])
        >>> found.comparisons[0].ranks, found.comparisons[0].margin
        ((0.0, 1.0), 2.0)
    """
    one_of("on_error", on_error, ("raise", "drop"))
    check_fields(columns or {})
    comparisons: list[Comparison] = []
    dropped: list[DroppedRow] = []
    shapes: Counter[str] = Counter()
    for where, row in rows_or_errors(source, "comparisons"):
        try:
            if isinstance(row, ConfigError):
                raise row
            shape, comparison = comparison_of_row(with_columns(present(row, keep_nan=True), columns, where), where)
            for message in itertools.chain(comparison.prompt, *comparison.replies):
                check_encodable(message["content"], where, "a message")
            if tools := canonical_tools(comparison.metadata.get("tools"), f"{where}: 'tools'"):
                comparison = replace(comparison, tools=tools)
        except ConfigError as error:
            if on_error == "raise":
                raise
            dropped.append(DroppedRow(where, str(error).removeprefix(f"{where}: ")))
            continue
        reason = _reason_to_drop(comparison)
        if reason is None:
            comparisons.append(comparison)
            shapes[shape] += 1
        else:
            dropped.append(DroppedRow(where, reason))
    described = describe_source(source)
    if not comparisons and not dropped:
        raise ConfigError(f"comparisons: {described} has no rows; expected at least one.")
    if not comparisons:
        reasons = grouped((each.reason.removesuffix("."), each.where) for each in dropped)[:3]
        raise ConfigError(
            f"comparisons: all {len(dropped)} rows of {described} were dropped: "
            f"{'; '.join(f'{each.count} x {each.text}' for each in reasons)}. The first one is {dropped[0].where}."
        )
    return ComparisonSet(name or described.strip("'"), tuple(comparisons), tuple(dropped), dict(shapes))


def prompt_of(comparison: Comparison, prompt_id: str) -> Prompt:
    """Return the data row that the replies of a comparison answer."""
    answer = None if (given := comparison.metadata.get("answer")) is None else str(given)
    return Prompt(comparison.prompt, prompt_id, (), answer, comparison.metadata, comparison.tools)


def _reason_to_drop(comparison: Comparison) -> str | None:
    """Return why a comparison is of no use, or None."""
    replies = comparison.replies
    for index, reply in enumerate(replies):
        if not any(message["content"].strip() or message.keys() - {"role", "content"} for message in reply):
            return f"reply {index + 1} of {len(replies)} is empty"
    if len(replies) > 1 and all(reply == replies[0] for reply in replies[1:]):
        return f"all {len(replies)} replies are equal"
    if comparison.ranks is not None and len(replies) < 2:
        return "a rank of a single reply says nothing"
    ratings = [value for scores in comparison.scores.values() for value in scores if value == value]
    if comparison.ranks is None and comparison.step_labels is None and not ratings:
        return "no preference, rating or label is known"
    return None
