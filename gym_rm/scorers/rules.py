"""Rules for the form of a reply: format, length, and repetition. They need no model."""

from __future__ import annotations

import abc
import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import regex

from gym_rm.checks import integer, one_of
from gym_rm.engine.text.judged import Judged
from gym_rm.errors import ConfigError
from gym_rm.scorers.reply_scorer import Grade, ReplyScorer
from gym_rm.types import Prompt

MATCHING_SECONDS = 0.1
"""Most time of a regular expression on one reply; a reply that takes longer does not match."""


_NO_TAG = "[^<]*+(?:<(?!/?(?:think|answer)>)[^<]*+)*+"
FORMATS = {
    "think_answer": rf"\s*<think>{_NO_TAG}</think>\n<answer>{_NO_TAG}</answer>\s*",
    "boxed": r".*\\boxed\s*\{\s*[^\s}].*",
}
"""Regular expressions that a whole reply must match, by name."""


class Rule(ReplyScorer):
    """Base class of rules: a number for the last reply of each conversation.

    With `judged="answer"`, a reply whose thinking has not ended gets `lowest`, so that not ending it never pays.

    Args:
        judged, thinking: fields of `JudgedOptions`.
    """

    as_empty = False
    lowest = -1.0
    """Lowest value of the rule."""

    def __init__(self, *, judged: Judged = "all", thinking: Any = None) -> None:
        unfinished = {"unfinished": self.lowest} if judged == "answer" else {}
        super().__init__(judged=judged, thinking=thinking, **unfinished)

    def grades(self, replies: Sequence[tuple[str, Prompt | None]]) -> Sequence[Grade]:
        """Return the values of replies."""
        return [Grade(self.value(reply)) for reply, _ in replies]

    @abc.abstractmethod
    def value(self, reply: str) -> float:
        """Return the number for a reply."""


class FormatScorer(Rule):
    """1.0 if the whole reply has a format, else 0.0.

    Args:
        format: `"think_answer"`: `<think>...</think>`, a line break, `<answer>...</answer>`, and nothing else;
            `"boxed"`: has `\\boxed{...}` with something in it.
        pattern: instead of `format`, a regular expression that must match the whole reply (`.` matches line breaks).
            A reply on which it takes longer than `MATCHING_SECONDS` does not match.
        **judged: `judged` and `thinking`, see `Rule`. With `judged="all"`, `thinking="opened"` puts the opening tag
            before a reply that lacks it, because the chat template of the policy wrote it.

    Raises:
        ConfigError: not exactly one of both is given, or it is invalid.

    Example:
        >>> rule = FormatScorer(pattern=r"It is \\d+\\.")
        >>> rule.score([[{"role": "assistant", "content": "It is 18."}]]).rewards.tolist()
        [1.0]
    """

    lowest = 0.0

    def __init__(self, *, format: str | None = None, pattern: str | None = None, **judged: Any) -> None:
        super().__init__(**judged)
        if (format is None) == (pattern is None):
            raise ConfigError(f"give either format or pattern, got format={format!r} and pattern={pattern!r}.")
        if format == "think_answer" and (
            self._judged.judged == "answer" or self._judged.thinking.tags[0][0] != "<think>"
        ):
            raise ConfigError(
                "format='think_answer' is for judged='all' and the tags <think> and </think>; use pattern=."
            )
        self.format, self.pattern = format, pattern
        used = pattern if format is None else FORMATS[one_of("format", format, list(FORMATS))]
        try:
            self._compiled = regex.compile(used, regex.DOTALL)
        except (regex.error, TypeError, RecursionError) as error:
            raise ConfigError(f"pattern must be a regular expression, got {pattern!r:.100}: {error}.") from error

    def value(self, reply: str) -> float:
        """Return whether the reply has the format, as 1.0 or 0.0."""
        thinking = self._judged.thinking
        if thinking.opened and self._judged.judged == "all":
            written = any(reply.lstrip().startswith(opening) for opening, _ in thinking.tags)
            reply = reply if written else thinking.tags[0][0] + reply
        try:
            return float(self._compiled.fullmatch(reply, timeout=MATCHING_SECONDS) is not None)
        except TimeoutError:
            return 0.0


class LengthScorer(Rule):
    """0.0 for a reply of an allowed length, falling to -1.0 outside of it.

    A reply longer than `max_length` minus `buffer` has `(max_length - buffer - length) / buffer`, and at least -1.0:
    the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13).

    Args:
        max_length: number of characters from which the value is -1.0.
        buffer: characters before it over which the value falls; None for a quarter of `max_length`.
        **judged: `judged` and `thinking`, see `Rule`.

    Raises:
        ConfigError: a length is invalid.

    Example:
        >>> rule = LengthScorer(max_length=8, buffer=4)
        >>> rule.score([[{"role": "assistant", "content": "It is 4"}]]).rewards.tolist()
        [-0.75]
    """

    def __init__(self, *, max_length: int, buffer: int | None = None, **judged: Any) -> None:
        super().__init__(**judged)
        self.max_length = integer("max_length", max_length, minimum=1)
        self.buffer = max(1, self.max_length // 4) if buffer is None else integer("buffer", buffer, minimum=1)
        if self.buffer > self.max_length:
            raise ConfigError(f"buffer={self.buffer} must be at most max_length={self.max_length}.")

    def value(self, reply: str) -> float:
        """Return the penalty of a reply, in [-1, 0]."""
        return min(0.0, max(-1.0, (self.max_length - self.buffer - len(reply)) / self.buffer))


class RepetitionScorer(Rule):
    """Minus the share of runs of `size` words that occurred before in the reply; see `repetition`.

    Args:
        size: words in a run.
        **judged: `judged` and `thinking`, see `Rule`.

    Raises:
        ConfigError: an argument is invalid.

    Example:
        >>> RepetitionScorer(size=1).score([[{"role": "assistant", "content": "a b a b"}]]).rewards.tolist()
        [-0.5]
    """

    def __init__(self, *, size: int = 4, **judged: Any) -> None:
        super().__init__(**judged)
        self.size = integer("size", size, minimum=1)

    def value(self, reply: str) -> float:
        """Return the penalty of a reply, in [-1, 0]."""
        return 0.0 - repetition(reply, size=self.size)


def repetition(text: str, *, size: int = 4) -> float:
    """Return the share of runs of `size` words that occurred before in the text; 0 for a short text.

    Source: the n-gram repetition penalty of arXiv 2502.03373, appendix. Words are those of Unicode (UAX 29): characters
    in scripts without spaces, and each symbol or emoji. A word of more than `LONGEST_WORD` characters is its characters
    too. So that a run of these is as long as one of words, it has `WORD_LENGTH` characters for each word but the first.
    """
    words = _words(text)
    ends = list(itertools.accumulate(map(len, words), initial=0))
    shortest = WORD_LENGTH * (size - 1)
    stops = [max(start + size, bisect.bisect_left(ends, ends[start] + shortest)) for start in range(len(words))]
    runs = [tuple(words[start:stop]) for start, stop in enumerate(stops) if stop <= len(words)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _words(text: str) -> list[str]:
    """Return the words of a text, or the characters of long ones; a ruled line counts as one of its signs."""
    ruled = _RULE.sub(lambda line: line[1] if len(line[0]) <= LONGEST_RULE else line[0], text.lower())
    words = [word for word in _BOUNDARY.split(ruled) if word.strip()]
    pieces = ([word] if len(word) <= LONGEST_WORD else _CHARACTER.findall(word) for word in words)
    return list(itertools.chain.from_iterable(pieces))


WORD_LENGTH, LONGEST_WORD, LONGEST_RULE = 5, 30, 80
_BOUNDARY = regex.compile(r"(?V1w)\b")
_CHARACTER = regex.compile(r"\X")
_RULE = regex.compile(r"([-=_*~#─═━])\1*+")
