"""Comparisons as tokens: how long they are, and what replies share."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gym_rm.data.findings import Finding, grouped
from gym_rm.engine.text.rendered import Rendered, common_prefix
from gym_rm.engine.text.renderer import TextReader
from gym_rm.errors import ConversationError
from gym_rm.types import Comparison, Conversation

MOST_COMPARISONS = 10_000  # that are tokenised
CHUNK = 256
QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """Numbers of tokens of the conversations of a set.

    Attributes:
        model: name of the model or tokenizer.
        comparisons: number of comparisons that were tokenised.
        quantiles: minimum, median, 90 %, 99 % and maximum of the tokens of a conversation.
        max_length: maximum number of tokens that the model reads, or None.
        too_long: number of comparisons with a longer conversation.
        tokens: number of tokens of all conversations.
        unique_tokens: number of tokens if the replies of a comparison share the tokens at their start.
        failed: reasons for conversations that the model cannot read.
    """

    model: str
    comparisons: int
    quantiles: tuple[float, ...]
    max_length: int | None
    too_long: int
    tokens: int
    unique_tokens: int
    failed: tuple[Finding, ...]


def measure_tokens(comparisons: Sequence[Comparison], reader: TextReader) -> TokenLengths:
    """Return the numbers of tokens of comparisons; of more than 10,000, some at equal distances are measured."""
    count = min(len(comparisons), MOST_COMPARISONS)
    taken = [comparisons[index * len(comparisons) // count] for index in range(count)]
    lengths: list[int] = []
    totals: Counter[str] = Counter()
    failed: list[tuple[str, str]] = []
    for each, rendered in _encoded(taken, reader):
        errors = [result for result in rendered if isinstance(result, ConversationError)]
        ids = [result.input_ids for result in rendered if not isinstance(result, ConversationError)]
        if errors:
            failed.append((str(errors[0]), each.where))
        own = [len(one) for one in ids]
        lengths += own
        totals["too_long"] += reader.max_length is not None and max(own, default=0) > reader.max_length
        totals["unique"] += sum(own) - sum(itertools.starmap(common_prefix, itertools.pairwise(sorted(ids, key=list))))
    return TokenLengths(
        reader.name,
        len(taken),
        tuple(np.quantile(lengths, QUANTILES).tolist()) if lengths else (),
        reader.max_length,
        totals["too_long"],
        sum(lengths),
        totals["unique"],
        grouped(failed),
    )


def _encoded(
    comparisons: Sequence[Comparison], reader: TextReader
) -> Iterator[tuple[Comparison, list[Rendered | ConversationError]]]:
    for start in range(0, len(comparisons), CHUNK):
        chunk = comparisons[start : start + CHUNK]
        conversations: list[Conversation] = [each for comparison in chunk for each in comparison.conversations]
        tools = [comparison.tools for comparison in chunk for _ in comparison.replies]
        results = iter(reader.renderer.encode(conversations, tools))
        yield from ((each, list(itertools.islice(results, len(each.replies)))) for each in chunk)
