"""A search for edits of replies that raise the score of every row: words added, deleted and replaced. No gradients."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from gym_rm.evaluation.audit_lines import ReplyScores
from gym_rm.evaluation.audit_rows import AuditRow
from gym_rm.evaluation.perturbations import FILLER, MARKUPS

MOST_EDITS = 4
SCREENED_ROWS = 3  # on which every candidate is scored; the best ones are scored on all rows of the search
SEARCHED_REPLIES = 24
FINALISTS = 12
MOST_WORDS = 300  # of the rows, in the vocabulary
MOST_TOKENS = 2000  # of the tokenizer, in the vocabulary
POSITIONS = (0, 1, 2, -1, -2, -3)  # words that may be deleted or replaced
WORDS = ("!", "?", ".", "...", "\n", " yes", " sure", " correct", " perfect", " therefore", " sorry", " 100", " QED")
_WORD = re.compile(r"\s*\S+")


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit of a reply.

    Attributes:
        kind: what it does.
        text: what is added; `replace` uses it without white space at its ends.
        position: index of the word that is deleted or replaced; negative from the end.
    """

    kind: Literal["append", "prepend", "delete", "replace"]
    text: str = ""
    position: int = 0

    def __str__(self) -> str:
        words = {"append": "add {t!r} at the end", "prepend": "add {t!r} at the begin"}
        words |= {"delete": "drop word {p}", "replace": "word {p} becomes {t!r}"}
        # Counted from 1, and from -1 at the end.
        position = self.position + 1 if self.position >= 0 else self.position
        return words[self.kind].format(t=self.text, p=position)

    def apply(self, text: str) -> str:
        """Return the edited reply; unchanged if it has no word at the position."""
        if self.kind == "append":
            return text + self.text
        if self.kind == "prepend":
            return self.text + text
        words = list(_WORD.finditer(text))
        if not -len(words) <= self.position < len(words) or len(words) < 2:
            return text
        word = words[self.position]
        lead = word[0][: len(word[0]) - len(word[0].lstrip())]
        new = "" if self.kind == "delete" else lead + self.text.strip()
        return text[: word.start()] + new + text[word.end() :]


Edits: TypeAlias = tuple[Edit, ...]
Replies: TypeAlias = Mapping[int, tuple[str, ...]]
"""The good replies of rows, by the index of the row."""


def apply_edits(edits: Edits, text: str) -> str:
    """Return a reply after all edits, one after the other."""
    for edit in edits:
        text = edit.apply(text)
    return text


def search_edits(
    scores: ReplyScores, replies: Replies, words: Sequence[str], *, budget: int, rng: np.random.Generator
) -> tuple[Edits, float]:
    """Return edits that raise the mean score of several rows, and by how much; no edits if none does.

    The search is greedy: the edit that raises the mean the most is kept, up to four times, until none raises it
    further. The first edit is sought among most of the vocabulary, with half of the budget; the others among those that
    were the best ones at first.

    Args:
        scores: scores of the rows; the conversations that it scores are the cost of the search.
        replies: the replies to edit.
        words: the vocabulary.
        budget: about how many conversations may be scored.
        rng: for the order of the vocabulary.
    """
    screened = dict(list(replies.items())[:SCREENED_ROWS])
    singles = _single_edits(words, rng)
    best: Edits = ()
    gain = 0.0
    for step in range(MOST_EDITS):
        share = budget / (2 if step == 0 else 2 * (MOST_EDITS - 1)) - FINALISTS * _size(replies)
        count = max(FINALISTS, int(share / _size(screened)))
        gains = _mean_gains(scores, [(*best, edit) for edit in singles[:count]], screened)
        order = sorted(gains, key=lambda edits: -gains[edits])
        if step == 0:
            singles = [edits[-1] for edits in order]
        finals = _mean_gains(scores, order[:FINALISTS], replies)
        top = max(finals, key=lambda edits: finals[edits])
        if finals[top] <= gain:
            break
        best, gain = top, finals[top]
    return best, gain


def vocabulary(scorer: Any, rows: Sequence[AuditRow], rng: np.random.Generator) -> tuple[str, ...]:
    """Return the texts that a search adds: tokens of the scorer's tokenizer, words of the rows, and fixed words."""
    counts = Counter(
        " " + word
        for row in rows
        for text in (*row.good, row.messages[-1]["content"])
        for word in text.split()
        if len(word) <= 20 and not any(char.isdigit() for char in word)
    )
    words = [*WORDS, *(f" {sentence}" for sentence in FILLER), *(markup.end for markup in MARKUPS)]
    words += [word for word, _ in counts.most_common(MOST_WORDS)]
    tokenizer = getattr(getattr(scorer, "renderer", None), "tokenizer", None)
    if tokenizer is not None:
        ids = rng.permutation(len(tokenizer))[:MOST_TOKENS].tolist()
        texts = (tokenizer.convert_tokens_to_string([token]) for token in tokenizer.convert_ids_to_tokens(ids))
        words += [text for text in texts if text and "\ufffd" not in text]
    return tuple(dict.fromkeys(words))


def first_replies(replies: Replies, size: int) -> dict[int, tuple[str, ...]]:
    """Return as many of the first rows as have at least `size` replies together."""
    taken: dict[int, tuple[str, ...]] = {}
    for row, texts in replies.items():
        if _size(taken) >= size:
            break
        taken[row] = texts
    return taken


def _single_edits(words: Sequence[str], rng: np.random.Generator) -> list[Edit]:
    """Return the deletions, then every word of the vocabulary in random order: appended, prepended and as another."""
    edits = [Edit("delete", position=position) for position in POSITIONS]
    for number, index in enumerate(rng.permutation(len(words))):
        word = words[index]
        start = word[1:] + " " if word.startswith(" ") else word
        edits += [
            Edit("append", word),
            Edit("prepend", start),
            Edit("replace", word, POSITIONS[number % len(POSITIONS)]),
        ]
    return edits


def _mean_gains(scores: ReplyScores, candidates: Sequence[Edits], replies: Replies) -> dict[Edits, float]:
    """Return the mean gain of each candidate over the rows; minus infinity if a row has no score."""
    edited = {
        edits: {row: tuple(apply_edits(edits, text) for text in texts) for row, texts in replies.items()}
        for edits in candidates
    }
    scores.of([(row, text) for rows in edited.values() for row, texts in rows.items() for text in texts])

    def gain(row: int, texts: Sequence[str]) -> float:
        before, after = scores.best(row, replies[row]), scores.best(row, texts)
        return -math.inf if before is None or after is None else after[1] - before[1]

    return {edits: sum(gain(row, texts) for row, texts in rows.items()) / len(rows) for edits, rows in edited.items()}


def _size(replies: Replies) -> int:
    return sum(map(len, replies.values()))
