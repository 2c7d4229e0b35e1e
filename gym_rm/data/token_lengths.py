"""Comparisons as tokens: how long they are, what replies share, and examples with the token that a model reads."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gym_rm.data.findings import EXAMPLES, Finding
from gym_rm.engine.text.rendered import Rendered, common_prefix
from gym_rm.engine.text.text_reader import TextReader
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


@dataclass(frozen=True, slots=True)
class RenderedReply:
    """A conversation with one of the replies, as tokens.

    Attributes:
        rank: rank of the reply, or None.
        tokens: the text of each token; without a tokenizer the text of each message.
        reply_start: index of the first token of the reply; None if it is not known.
        read: indices of the tokens at which the reward is read.
        error: why the model cannot read the conversation, or None.
    """

    rank: float | None
    tokens: tuple[str, ...]
    reply_start: int | None = None
    read: tuple[int, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ComparisonExample:
    """A comparison as the model reads it.

    Attributes:
        where: file and line.
        source: name of the source.
        replies: its conversations.
    """

    where: str
    source: str
    replies: tuple[RenderedReply, ...]


def measure_tokens(comparisons: Sequence[Comparison], reader: TextReader) -> TokenLengths:
    """Return the numbers of tokens of comparisons; of more than 10,000, some at equal distances are measured."""
    taken = _spread(comparisons, MOST_COMPARISONS)
    lengths: list[int] = []
    totals: Counter[str] = Counter()
    places: dict[str, list[str]] = defaultdict(list)
    for each, rendered in _encoded(taken, reader):
        errors = [result for result in rendered if isinstance(result, ConversationError)]
        ids = [result.input_ids for result in rendered if not isinstance(result, ConversationError)]
        if errors:
            places[str(errors[0])].append(each.where)
        own = [len(one) for one in ids]
        lengths += own
        totals["too_long"] += reader.max_length is not None and max(own, default=0) > reader.max_length
        totals["unique"] += sum(own) - sum(itertools.starmap(common_prefix, itertools.pairwise(sorted(ids, key=list))))
    failed = [Finding(text, len(wheres), tuple(wheres[:EXAMPLES])) for text, wheres in places.items()]
    return TokenLengths(
        reader.name,
        len(taken),
        tuple(np.quantile(lengths, QUANTILES).tolist()) if lengths else (),
        reader.max_length,
        totals["too_long"],
        sum(lengths),
        totals["unique"],
        tuple(sorted(failed, key=lambda finding: -finding.count)),
    )


def make_examples(
    comparisons: Sequence[Comparison], reader: TextReader | None, count: int
) -> tuple[ComparisonExample, ...]:
    """Return some comparisons, at equal distances, as the model reads them, or as texts without a reader."""
    return tuple(
        ComparisonExample(
            each.where,
            each.source,
            tuple(
                _rendered_reply(each, index) if reader is None else _read_reply(each, index, reader)
                for index in range(len(each.replies))
            ),
        )
        for each in _spread(comparisons, count)
    )


def _encoded(
    comparisons: Sequence[Comparison], reader: TextReader
) -> Iterator[tuple[Comparison, list[Rendered | ConversationError]]]:
    for start in range(0, len(comparisons), CHUNK):
        chunk = comparisons[start : start + CHUNK]
        conversations: list[Conversation] = [each for comparison in chunk for each in comparison.conversations]
        results = iter(reader.renderer.encode(conversations))
        yield from ((each, list(itertools.islice(results, len(each.replies)))) for each in chunk)


def _rendered_reply(comparison: Comparison, index: int) -> RenderedReply:
    texts = tuple(f"{message['role']}: {message['content']}" for message in comparison.conversations[index])
    return RenderedReply(_rank(comparison, index), texts, len(comparison.prompt))


def _read_reply(comparison: Comparison, index: int, reader: TextReader) -> RenderedReply:
    (rendered,) = reader.renderer.encode([comparison.conversations[index]])
    rank = _rank(comparison, index)
    if isinstance(rendered, ConversationError):
        return RenderedReply(rank, (), error=str(rendered))
    try:
        read = tuple(int(position) for position in reader.read_positions(rendered))
    except ConversationError as error:
        return RenderedReply(rank, (), error=str(error))
    tokens = tuple(reader.renderer.tokenizer.decode([token]) for token in rendered.input_ids.tolist())
    return RenderedReply(rank, tokens, reader.reply_start(comparison, index, rendered), read)


def _rank(comparison: Comparison, index: int) -> float | None:
    return None if comparison.ranks is None else comparison.ranks[index]


def _spread(comparisons: Sequence[Comparison], count: int) -> list[Comparison]:
    """Return at most `count` comparisons at equal distances, with the first one."""
    if len(comparisons) <= count:
        return list(comparisons)
    return [comparisons[index * len(comparisons) // count] for index in range(count)]
