"""The rows of an audit: a prompt with one or more good replies, and worse ones if they are known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gym_rm.checks import integer
from gym_rm.data.comparisons import load_comparisons
from gym_rm.data.prompts import answer_text, load_prompts
from gym_rm.data.rows import Source, describe_source, sampled
from gym_rm.errors import ConfigError
from gym_rm.types import Comparison, Conversation, Message, Prompt

MOST_GOOD_REPLIES = 4
# The proper wordings of an answer to the embedded prompts.
WORDINGS = ("It is {answer}.", "That is {answer}.", "The answer is {answer}.", "I would say {answer}.")


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One prompt with its good replies.

    Attributes:
        prompt: the row, with the reference `answer` if there is one; scorers receive it.
        messages: the messages before the reply that is changed.
        good: replies that are equally good; at least one.
        bad: replies that are worse, at most as many as good ones, because the best of each are compared.
    """

    prompt: Prompt
    messages: tuple[Message, ...]
    good: tuple[str, ...]
    bad: tuple[str, ...] = ()

    def conversation(self, reply: str) -> Conversation:
        """Return the conversation that ends with this reply."""
        return (*self.messages, Message(role="assistant", content=reply))


@dataclass(frozen=True, slots=True)
class AuditRows:
    """The rows of an audit.

    Attributes:
        source: where they come from.
        rows: the rows.
        dropped: number of rows of the source without a usable good reply.
    """

    source: str
    rows: tuple[AuditRow, ...]
    dropped: int = 0


def load_audit_rows(source: Source = None, *, limit: int = 128, seed: int = 0) -> AuditRows:
    """Load the rows of an audit.

    Args:
        source: None for the embedded prompts with their right answers in four wordings; preferences in a form that
            `load_comparisons` reads, of which the best replies are audited; or prompts with reference replies, or with
            an `answer`, which is then the reply.
        limit: most rows; if there are more, a random sample is taken.
        seed: seed of the sample.

    Raises:
        ConfigError: the source cannot be read, or no row has a reply.
    """
    integer("rows", limit, minimum=1)
    found = _embedded() if source is None else _of_source(source)
    rows = [row for row in found if row is not None]
    name = "embedded prompts" if source is None else describe_source(source).strip("'")
    if not rows:
        raise ConfigError(
            f"data: {name} has no row with a good reply to audit. Expected 'chosen' and 'rejected', ranked or graded "
            "replies, messages that end with an assistant turn, or a prompt with an 'answer'."
        )
    return AuditRows(name, tuple(sampled(rows, limit, seed=seed)), dropped=len(found) - len(rows))


def _embedded() -> list[AuditRow | None]:
    return [
        AuditRow(prompt, prompt.messages, tuple(wording.format(answer=prompt.answer) for wording in WORDINGS))
        for prompt in load_prompts()
    ]


def _of_source(source: Source) -> list[AuditRow | None]:
    if not isinstance(source, str) and isinstance(source, Iterable):
        source = list(source)  # it is read twice if the rows are no comparisons
    try:
        found = load_comparisons(source, on_error="drop")
    except ConfigError:
        return [_of_prompt(prompt) for prompt in load_prompts(source)]
    if not found.comparisons:
        return [_of_prompt(prompt) for prompt in load_prompts(source)]
    return [*map(_of_comparison, found.comparisons), *([None] * len(found.dropped))]


def _of_prompt(prompt: Prompt) -> AuditRow | None:
    """Return the row of a prompt with a reference reply; None if it has none."""
    texts = (prompt.metadata.get("reference_reply"), prompt.metadata.get("response"), prompt.answer)
    reply = next((text for text in texts if isinstance(text, str) and text.strip()), None)
    return None if reply is None else AuditRow(prompt, prompt.messages, (reply,))


def _of_comparison(comparison: Comparison) -> AuditRow | None:
    """Return the row of a comparison: its best replies are good, unless all are equally good.

    None if the best reply is not a text of the assistant, or nothing is known about which replies are good.
    """
    ranks = comparison.ranks
    if ranks is None or comparison.is_tie or any(math.isnan(rank) for rank in ranks):
        return None
    best = ranks.index(min(ranks))
    lead = comparison.replies[best][:-1]
    texts: dict[bool, list[str]] = {True: [], False: []}
    for rank, reply in zip(ranks, comparison.replies, strict=True):
        last = reply[-1]
        # Replies of several messages are compared only if all but the last are the same.
        if last["role"] == "assistant" and last["content"].strip() and reply[:-1] == lead:
            texts[rank == ranks[best]].append(last["content"])
    if not texts[True] or not (comparison.prompt or lead):
        return None
    metadata = comparison.metadata
    answer = answer_text(metadata.get("answer"))
    prompt = Prompt(comparison.prompt, comparison.where, answer=answer, metadata=metadata, tools=comparison.tools)
    good = tuple(dict.fromkeys(texts[True]))[:MOST_GOOD_REPLIES]
    return AuditRow(prompt, (*comparison.prompt, *lead), good, tuple(dict.fromkeys(texts[False]))[: len(good)])


def other_replies(rows: Sequence[AuditRow]) -> list[tuple[str, ...]]:
    """Return for each row the good replies of a later row with another answer; none if there is no such row."""

    def differs(row: AuditRow, other: AuditRow) -> bool:
        same_answer = row.prompt.answer is not None and row.prompt.answer == other.prompt.answer
        same = same_answer or row.messages == other.messages
        return not same and not {*other.good} & {*row.good, *row.bad}

    size = len(rows)
    later = ([rows[(index + step) % size] for step in range(1, size)] for index in range(size))
    return [
        next((other.good[: len(row.good)] for other in others if differs(row, other)), ())
        for row, others in zip(rows, later, strict=True)
    ]
