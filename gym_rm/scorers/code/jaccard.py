"""Similarity of a reply to a reference by their words, as the code_jaccard environment of NeMo RL scores it."""

from __future__ import annotations

from gym_rm.errors import ConversationError
from gym_rm.scorers.rules import Rule
from gym_rm.types import Prompt

REFERENCES = ("canonical_solution", "reference_reply")
"""Fields of `Prompt.metadata` with a reference, if the prompt has no `answer`."""


def similarity(reply: str, reference: str) -> float:
    """Return the Jaccard similarity of the sets of words, times the ratio of the lengths in characters, in [0, 1].

    Case is ignored and words are divided by whitespace. Equal texts, apart from the whitespace around them, have 1.0.

    Example:
        >>> similarity("a b c", "a b d"), similarity("Same text", "same text ")
        (0.5, 1.0)
    """
    reply, reference = reply.lower().strip(), reference.lower().strip()
    if reply == reference:
        return 1.0
    words, expected = set(reply.split()), set(reference.split())
    if not words or not expected:
        return 0.0
    ratio = min(len(reply), len(reference)) / max(len(reply), len(reference))
    return len(words & expected) / len(words | expected) * ratio


class CodeJaccardScorer(Rule):
    """Rewards the similarity of the last reply to the reference: no code runs, so it also works where none may.

    The reference is the prompt's `answer`, or its `canonical_solution` or `reference_reply`.

    Example:
        >>> prompt = Prompt(({"role": "user", "content": "Double x."},), "p", answer="return 2 * x")
        >>> reply = {"role": "assistant", "content": "return x * 2"}
        >>> CodeJaccardScorer().score([[*prompt.messages, reply]], [prompt]).rewards.tolist()
        [1.0]
    """

    def value(self, reply: str, prompt: Prompt | None) -> float:
        """Return the similarity of a reply to the reference of its row."""
        metadata = {} if prompt is None else prompt.metadata
        given = [prompt.answer if prompt else None, *(metadata.get(name) for name in REFERENCES)]
        reference = next((text for text in given if isinstance(text, str)), None)
        if reference is None:
            raise ConversationError(f"the data row has no answer and none of {list(REFERENCES)}")
        return similarity(reply, reference)
