"""Find the text of messages that a chat template does not write.

A template may drop a message (a role that it does not know), a field (`tool_calls`) or a part of a text (everything
before `</think>`). It may also trim, escape or upper-case text, which is not a loss.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
import operator
import re
import urllib.parse
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jinja2

from gym_rm.engine.text.control_tokens import PRIVATE_USE
from gym_rm.engine.text.messages import extra_fields, map_leaves, texts_of
from gym_rm.errors import ConversationError
from gym_rm.types import Conversation, Message

REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})
IDENTIFIERS = frozenset({"id", "type", "index", "tool_call_id"})  # they connect messages; many templates omit them
LONGEST_LITERAL = 64
SHORT = 16
TOOL_ROLES = frozenset({"tool", "function", "ipython"})  # their `name` identifies the call, like `tool_call_id`
ESCAPED = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..")
PRINTED = re.compile(r"\\U[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Dropped:
    """Text of one field of one message that the template does not write.

    Attributes:
        index: index of the message.
        field: `"content"` or the key of another field.
        characters: number of characters that are not written, without white space.
        whole: whether nothing of the field is written.
        excerpt: beginning of the missing text.
    """

    index: int
    field: str
    characters: int
    whole: bool
    excerpt: str

    def error(self, role: str) -> ConversationError:
        """Return the error for a message with this role."""
        if self.field != "content":
            return ConversationError(
                f"message {self.index} has the field {self.field!r}, which the chat template does not write completely "
                f"({self.excerpt!r} is missing); write it into the content or remove it, or pass dropped_text='warn' "
                "to score the conversation without it."
            )
        if self.whole:
            what = f"message {self.index} with the role {role!r}"
        else:
            what = f"{self.characters} characters of message {self.index}, the last one"
        return ConversationError(
            f"the chat template does not write {what} (missing: {self.excerpt!r}...), so the model would not see this "
            "text; pass dropped_text='warn' to score the conversation without it, or another chat_template=."
        )


def contains_all(texts: Sequence[str], written: str, *, overhead: int) -> bool:
    """Return whether `written` has all texts in this order, except for white space.

    Args:
        texts: contents of the messages.
        written: text that the template writes.
        overhead: number of characters that the template adds to messages with these roles, without white space. A short
            text that the template drops may occur in these characters by accident; `written` is then too short.
    """
    if min(map(len, texts)) >= SHORT and find_ends(texts, written) is not None:
        return True
    packed, all_written = [pack(text) for text in texts], pack(written)
    if find_ends(packed, all_written) is None:
        return False
    return min(map(len, packed)) >= SHORT or len(all_written) >= overhead + sum(map(len, packed))


def find_ends(texts: Sequence[str], written: str) -> list[int] | None:
    """Return where each text ends in `written`, which has them in this order; None if one is missing."""
    ends = [0]
    for text in texts:
        start = written.find(stripped := text.strip(), ends[-1])
        if start < 0:
            return None
        ends.append(start + len(stripped))
    return ends[1:]


def pack(text: str) -> str:
    """Return the text without white space."""
    return "".join(text.split())


class DroppedText:
    """Finds text that a chat template does not write.

    It writes the conversation once more, with a private-use character for every word, and looks for these characters.
    Texts that the template's source contains are not replaced, because the template may react to them.

    Args:
        template: Jinja source of the chat template.
    """

    def __init__(self, template: str) -> None:
        self.literals = frozenset(_literals(template))
        kept = {text for text in self.literals if text.strip() and len(text) <= LONGEST_LITERAL}
        kept -= {text for text in kept if len(text) == 1 and text.isalnum()}
        ordered = sorted(kept, key=lambda text: (-len(text), text))
        self._split = re.compile(f"({'|'.join(map(re.escape, ordered)) or '(?!)'})")

    def find(
        self,
        conversation: Conversation,
        write: Callable[[Conversation], str],
        *,
        unwritten: Collection[int] = (),
    ) -> list[Dropped]:
        """Return the text that `write` drops, by message and field.

        Args:
            conversation: the conversation.
            write: function that applies the template.
            unwritten: messages whose content the template drops in every conversation with these roles.
        """
        marks = _unused_characters(conversation)
        traces: dict[tuple[int, str], _Trace] = {}
        traced: list[Message] = []
        for index, message in enumerate(conversation):
            copy: dict[str, Any] = {"role": message["role"]}
            connecting = IDENTIFIERS | {"name"} if message["role"] in TOOL_ROLES else IDENTIFIERS
            for field in ("content", *extra_fields(message)):
                trace = _Trace(marks, self._split)
                value = cast(Mapping[str, Any], message)[field]
                if field in connecting:
                    copy[field] = trace.replace(value)
                else:
                    copy[field] = map_leaves(value, trace.replace, skip=IDENTIFIERS)
                    traces[index, field] = trace
            traced.append(cast(Message, copy))
        written = write(traced)
        # A template may also encode text, as in a URL, as JSON in ASCII, or as Python prints it.
        forms = (
            written,
            urllib.parse.unquote(written),
            ESCAPED.sub(lambda match: json.loads(f'"{match[0]}"'), written),
            PRINTED.sub(lambda match: chr(int(match[0][2:], 16)), written),
        )
        counts = functools.reduce(operator.or_, map(collections.Counter, dict.fromkeys(forms)))
        found = [
            trace.dropped(index, field, counts, written, index in unwritten) for (index, field), trace in traces.items()
        ]
        return [each for each in found if each is not None]


class _Trace:
    """Words of one field of a message, and the characters that stand for them."""

    def __init__(self, marks: Iterator[str], split: re.Pattern[str]) -> None:
        self._marks = marks
        self._split = split
        self._words: list[tuple[str, str]] = []  # (mark, word)
        self._numbers: list[tuple[str, str]] = []  # (mark, number)
        self._kept: list[str] = []

    def replace(self, leaf: Any) -> Any:
        """Return the text with marks for its words, or a number that stands for a number."""
        if isinstance(leaf, str):
            parts = self._split.split(leaf)
            self._kept += parts[1::2]
            parts[::2] = [re.sub(r"\S+", self._mark, part) for part in parts[::2]]
            return "".join(parts)
        if isinstance(leaf, int | float) and not isinstance(leaf, bool):
            number = 10_000_000 + ord(next(self._marks))
            self._numbers.append((str(number), str(leaf)))
            return number
        return leaf

    def _mark(self, match: re.Match[str]) -> str:
        mark = next(self._marks)
        self._words.append((mark, match[0]))
        return mark * len(match[0])

    def dropped(
        self, index: int, field: str, counts: Mapping[str, int], written: str, unwritten: bool
    ) -> Dropped | None:
        """Return what is missing in the written text; None if nothing is missing."""
        lost = [(word, len(word) - counts[mark]) for mark, word in self._words if counts[mark] < len(word)]
        lost += [(number, len(number)) for mark, number in self._numbers if mark not in written]
        total = sum(len(word) for _, word in (*self._words, *self._numbers))
        missing = sum(count for _, count in lost)
        if not total:
            # Only texts that the template may react to, or nothing: compare with what it writes.
            kept = pack("".join(self._kept))
            if (not kept and field == "content") or (kept and kept in pack(written) and not unwritten):
                return None
            return Dropped(index, field, len(kept), True, kept[:40])
        if not missing:
            return None
        return Dropped(index, field, missing, missing == total, " ".join(word for word, _ in lost)[:40])


def _unused_characters(conversation: Conversation) -> Iterator[str]:
    """Yield private-use characters that do not occur in the conversation, and repeat them after the last one."""
    used = set().union(*(text for message in conversation for text in texts_of(message)))
    free = (char for char in map(chr, PRIVATE_USE) if char not in used)
    return itertools.cycle(itertools.chain(free, [chr(PRIVATE_USE.stop)]))


def _literals(template: str) -> Iterator[str]:
    """Yield the string constants of a template, which it can compare with the text of messages."""
    try:
        for _, kind, value in jinja2.Environment().lex(template):
            if kind == "string":
                yield value[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")
    except (jinja2.TemplateSyntaxError, UnicodeDecodeError):
        return
