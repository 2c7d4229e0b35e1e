"""Similarity of a reply to a reference by their words, as the code_jaccard environment of NeMo RL scores it."""

from __future__ import annotations

from collections.abc import Sequence

from gym_rm.checks import finite
from gym_rm.engine.text.messages import reply_text
from gym_rm.errors import ConversationError
from gym_rm.scorer import check_rows
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Prompt, Prompts, Provenance

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


class CodeJaccardScorer:
    """Rewards the similarity of the last reply to the reference: no code runs, so it also works where none may.

    The reference is the prompt's `answer`, or its `canonical_solution` or `reference_reply`. `infos` has `verdict`:
    `"aligned"` for a similarity above `aligned_above`, else `"not_aligned"`.

    Args:
        aligned_above: bound of the verdict; NeMo RL has 0.5.

    Raises:
        ConfigError: the bound is not a finite number.

    Example:
        >>> prompt = Prompt(({"role": "user", "content": "Double x."},), "p", answer="return 2 * x")
        >>> reply = {"role": "assistant", "content": "return x * 2"}
        >>> CodeJaccardScorer().score([[*prompt.messages, reply]], [prompt]).rewards.tolist()
        [1.0]
    """

    def __init__(self, *, aligned_above: float = 0.5) -> None:
        self.aligned_above = finite("aligned_above", aligned_above)

    def __repr__(self) -> str:
        return f"CodeJaccardScorer(aligned_above={self.aligned_above})"

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Compare the last reply of N conversations with the references of their prompts.

        Raises:
            ConfigError: the arguments are not lists of one length.
            ScoringError: a row has no reference, or does not end with a reply.
        """
        check_rows(conversations, prompts)
        rewards = [float("nan")] * len(conversations)
        errors: list[str | None] = [None] * len(conversations)
        for row, conversation in enumerate(conversations):
            reference = _reference(None if prompts is None else prompts[row])
            try:
                reply = reply_text(conversation)
            except ConversationError as error:
                errors[row] = str(error)
                continue
            if reference is None:
                errors[row] = f"the data row has no answer and none of {list(REFERENCES)}"
            else:
                rewards[row] = similarity(reply, reference)
        aligned = ["aligned" if reward > self.aligned_above else "not_aligned" for reward in rewards]
        return Scores.from_rewards(
            rewards,
            errors=errors,
            infos={"verdict": aligned},
            provenance=Provenance("CodeJaccardScorer", "words", settings={"aligned_above": self.aligned_above}),
        ).raise_for_errors()


def _reference(prompt: Prompt | None) -> str | None:
    if prompt is None:
        return None
    found = [prompt.answer, *(prompt.metadata.get(name) for name in REFERENCES)]
    return next((each for each in found if isinstance(each, str)), None)
