"""Prompts that two sets have in common, for example training rows and a benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gym_rm.data.comparisons import ComparisonSet
from gym_rm.data.formats.detection import comparison_of_row
from gym_rm.data.formats.fields import ALL_PROMPT_FIELDS
from gym_rm.data.prompts import prompt_field, split_reference
from gym_rm.data.rows import Source, present, rows_or_errors
from gym_rm.errors import ConfigError
from gym_rm.types import Message

NGRAM_WORDS = 13  # as in GPT-3's search for benchmarks in its training data (arXiv 2005.14165, appendix C)
EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Overlap:
    """Prompts that two sets have in common.

    Attributes:
        first: name of the first set.
        second: name of the second set.
        equal: number of rows of the first set whose prompt is in the second one, but for case and white space.
        near: number of other rows of the first set whose prompt has 13 words in a row of a prompt of the second one.
        examples: the places of some of them in both sets, equal ones first.
    """

    first: str
    second: str
    equal: int
    near: int
    examples: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts of a set, with their places.

    Attributes:
        name: name of the set.
        prompts: the place and the messages of each prompt.
    """

    name: str
    prompts: tuple[tuple[str, tuple[Message, ...]], ...]


def load_prompt_set(source: Source, *, name: str) -> PromptSet:
    """Load the prompts of a set of preferences, or of a set of prompts without replies.

    Args:
        source: the file, data set or iterable.
        name: name of the set.

    Raises:
        ConfigError: the source cannot be read, or a row has no prompt.
    """
    prompts = []
    for where, raw in rows_or_errors(source, "against"):
        if isinstance(raw, ConfigError):
            raise raw
        row = present(raw)
        try:
            prompts.append((where, comparison_of_row(row, where)[1].prompt))
        except ConfigError:
            found = prompt_field(row, where, ALL_PROMPT_FIELDS) if isinstance(row, Mapping) else None
            if found is None:
                raise
            prompts.append((where, split_reference(found[1], where, found[0])[0]))
    return PromptSet(name, tuple(prompts))


def prompts_of(found: ComparisonSet) -> PromptSet:
    """Return the prompts of comparisons."""
    return PromptSet(found.name, tuple((each.where, each.prompt) for each in found.comparisons))


def find_overlap(first: PromptSet, second: PromptSet) -> Overlap:
    """Return the prompts that two sets have in common.

    Example:
        >>> one, other = ({"role": "user", "content": text} for text in ("What is 2 + 2?", "what is  2 + 2?"))
        >>> find_overlap(PromptSet("a", (("line 1", (one,)),)), PromptSet("b", (("line 7", (other,)),)))
        Overlap(first='a', second='b', equal=1, near=0, examples=(('line 1', 'line 7'),))
    """
    texts: dict[str, str] = {}
    ngrams: dict[str, str] = {}
    for where, prompt in second.prompts:
        text = normal_text(prompt)
        texts.setdefault(text, where)
        for ngram in _ngrams(text):
            ngrams.setdefault(ngram, where)
    equal, near = [], []
    for where, prompt in first.prompts:
        text = normal_text(prompt)
        if text in texts:
            equal.append((where, texts[text]))
        elif common := next((ngram for ngram in _ngrams(text) if ngram in ngrams), None):
            near.append((where, ngrams[common]))
    return Overlap(first.name, second.name, len(equal), len(near), tuple([*equal, *near][:EXAMPLES]))


def normal_text(messages: Sequence[Message]) -> str:
    """Return the text of messages in lower case with single spaces."""
    return " ".join(word for message in messages for word in message["content"].casefold().split())


def _ngrams(text: str) -> Iterator[str]:
    """Yield every 13 words in a row; none for a shorter text."""
    words = text.split()
    return (" ".join(words[start : start + NGRAM_WORDS]) for start in range(len(words) - NGRAM_WORDS + 1))
