"""Remarks on comparisons that may be mistakes of the data: roles, empty messages, markup."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gym_rm.data.messages import RENDERED
from gym_rm.data.pairs import pairs_of
from gym_rm.engine.text.messages import KNOWN_ROLES
from gym_rm.types import Comparison, Message

EXAMPLES = 3
TEMPLATE_COLUMNS = ("chat_template_kwargs",)  # that TRL passes to the chat template, beside the tools
_TRANSCRIPT = re.compile(r"(?:^|\n\n)(Human|Assistant|User):")

Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in the data that may be a mistake.

    Attributes:
        text: what was found.
        count: number of comparisons with it.
        examples: the places of the first ones.
    """

    text: str
    count: int
    examples: tuple[str, ...] = ()


def find_remarks(comparisons: Sequence[Comparison]) -> tuple[Finding, ...]:
    """Return what may be a mistake in the data, the most frequent remarks first."""
    return grouped(
        (text, each.where)
        for each in comparisons
        for text in dict.fromkeys(itertools.chain(_of_roles(each), _of_texts(each)))
    )


def grouped(places: Iterable[tuple[str, str]], kind: Callable[[str], str] = str) -> tuple[Finding, ...]:
    """Return a finding for each kind of text, with its first text and places, the most frequent first.

    Args:
        places: texts with the places that they are about.
        kind: function that returns what equal findings have in common.
    """
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for text, where in places:
        found[kind(text)].append((text, where))
    most = sorted(found.values(), key=len, reverse=True)
    return tuple(Finding(each[0][0], len(each), tuple(where for _, where in each[:EXAMPLES])) for each in most)


def find_duplicates(comparisons: Sequence[Comparison]) -> tuple[Finding, ...]:
    """Return equal prompts, equal comparisons, and pairs whose opposite is also in the data.

    The first of several equal rows is not counted.
    """
    prompts: set[Key] = set()
    whole: set[tuple[Key, frozenset[tuple[Key, float | None]]]] = set()
    pairs: set[tuple[Key, Key, Key]] = set()
    equal_prompts, equal, opposite = [], [], []
    for each in comparisons:
        prompt, replies = key_of(each.prompt), [key_of(reply) for reply in each.replies]
        if prompt in prompts:
            equal_prompts.append(each.where)
        ranked = (prompt, frozenset(zip(replies, each.ranks or (None,) * len(replies), strict=True)))
        if ranked in whole:
            equal.append(each.where)
        own = [(key_of(pair.chosen), key_of(pair.rejected)) for pair in pairs_of(each)]
        if any((prompt, rejected, chosen) in pairs for chosen, rejected in own):
            opposite.append(each.where)
        prompts.add(prompt)
        whole.add(ranked)
        pairs.update((prompt, chosen, rejected) for chosen, rejected in own)
    named = {
        "the prompt is equal to an earlier one": equal_prompts,
        "the prompt, the replies and the ranks are equal to earlier ones": equal,
        "the preference contradicts an earlier one of the same two replies": opposite,
    }
    return tuple(Finding(text, len(wheres), tuple(wheres[:EXAMPLES])) for text, wheres in named.items())


def key_of(messages: Iterable[Message]) -> Key:
    """Return roles and texts of messages, to compare them."""
    return tuple((message["role"], message["content"]) for message in messages)


def template_columns(comparison: Comparison) -> list[str]:
    """Return the columns of a row that its chat template would need, but that scoring does not pass to it."""
    return [name for name in TEMPLATE_COLUMNS if comparison.metadata.get(name) not in (None, "", "[]", "{}", [], {})]


def _of_roles(comparison: Comparison) -> Iterator[str]:
    prompt = comparison.prompt
    for name in template_columns(comparison):
        yield f"the row has {name!r}, which is not passed to the chat template; gym-rm train leaves the row out"
    for reply in comparison.replies:
        if reply[0]["role"] != "assistant":
            yield f"a reply begins with a turn of the role {reply[0]['role']!r}, not of the assistant"
        elif reply[-1]["role"] != "assistant":
            yield f"a reply ends with a turn of the role {reply[-1]['role']!r}, not of the assistant"
    if prompt and prompt[-1]["role"] == "assistant":
        yield "the prompt ends with a turn of the assistant"
    if "reference_reply" in comparison.metadata:
        yield "the prompt ended with a turn of the assistant, which is left out"
    messages = itertools.chain(prompt, *comparison.replies)
    for role in {message["role"] for message in messages} - KNOWN_ROLES:
        yield f"a message has the role {role!r}, which models may not know"


def _of_texts(comparison: Comparison) -> Iterator[str]:
    if not any(message["content"].strip() for message in comparison.prompt):
        yield "the prompt has no text"
    for message in comparison.prompt:
        if not message["content"].strip() and len(message) == 2:
            yield f"a {message['role']} message of the prompt is empty"
    for message in itertools.chain(comparison.prompt, *comparison.replies):
        text = message["content"]
        if found := RENDERED.search(text):
            yield f"a text contains the markup {found[0]!r} of a chat template"
        if found := _TRANSCRIPT.search(text):
            yield f"a text contains {found[1] + ':'!r} like a turn of a transcript"
    if len({key_of(reply) for reply in comparison.replies}) < len(comparison.replies):
        yield "some replies of the comparison are equal"
