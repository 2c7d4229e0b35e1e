"""Find the text of messages that a chat template does not write.

A template may drop a message (a role that it does not know), a field (`tool_calls`) or a part of a text (everything
before `</think>`). It may also trim, escape or upper-case text, which is not a loss.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jinja2

from gym_rm.engine.text.messages import extra_fields, map_leaves, texts_of
from gym_rm.errors import ConversationError
from gym_rm.types import Conversation, Message

REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})
IDENTIFIERS = frozenset({"id", "type", "index", "tool_call_id"})  # they connect messages; many templates omit them
TOOL_ROLES = frozenset({"tool", "function", "ipython"})  # their `name` identifies the call, like `tool_call_id`
MARKS = range(0x20000, 0x2A6DE)  # rare ideographs, which templates print as they are, also inside JSON and Python
LONGEST_LITERAL = 64
SHORT = 16


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
        what = f"message {self.index} with the role {role!r}"
        if self.field != "content":
            what = f"the field {self.field!r} of message {self.index}"
        elif not self.whole:
            what = f"{self.characters} characters of message {self.index}, the last one"
        return ConversationError(
            f"the chat template does not write {what} (missing: {self.excerpt!r}...), so the model would not see this "
            "text; pass dropped_text='warn' to score the conversation without it, or another chat_template=."
        )


def contains_all(texts: Sequence[str], written: str, *, overhead: int) -> bool:
    """Return whether `written` has all texts in this order, except for white space.

    `overhead` is the number of characters that the template adds to messages with these roles, without white space. A
    short text that the template drops may occur in these characters by accident; `written` is then too short.
    """
    packed, all_written = [pack(text) for text in texts], pack(written)
    end = 0
    for text in packed:
        start = all_written.find(text, end)
        if start < 0:
            return False
        end = start + len(text)
    return min(map(len, packed)) >= SHORT or len(all_written) >= overhead + sum(map(len, packed))


def pack(text: str) -> str:
    """Return the text without white space."""
    return "".join(text.split())


class DroppedText:
    """Finds text that a chat template does not write.

    It writes the conversation once more, with a rare character for every word, and looks for these characters. Texts
    that the template's source contains are not replaced, because the template may react to them.
    """

    def __init__(self, template: str) -> None:
        kept = {text for text in _literals(template) if text.strip() and len(text) <= LONGEST_LITERAL}
        kept -= {text for text in kept if len(text) == 1 and text.isalnum()}
        ordered = sorted(kept, key=lambda text: (-len(text), text))
        self._split = re.compile(f"({'|'.join(map(re.escape, ordered)) or '(?!)'})")

    def find(
        self, conversation: Conversation, write: Callable[[Conversation], str], *, unwritten: Collection[int] = ()
    ) -> list[Dropped]:
        """Return the text that `write` drops, by message and field.

        `unwritten` are the messages whose content the template drops in every conversation with these roles.
        """
        used = set().union(*(text for message in conversation for text in texts_of(message)))
        marks = itertools.cycle([char for char in map(chr, MARKS) if char not in used])
        words: dict[tuple[int, str], list[tuple[str, str]]] = {}  # (mark, word) by message and field
        traced: list[Message] = []
        for index, message in enumerate(conversation):
            copy: dict[str, Any] = {"role": message["role"]}
            skipped = IDENTIFIERS | {"name"} if message["role"] in TOOL_ROLES else IDENTIFIERS
            for field in ("content", *extra_fields(message)):
                value = cast(Mapping[str, Any], message)[field]
                of_field: list[tuple[str, str]] = []
                trace = functools.partial(self._trace, marks=marks, words=of_field)
                copy[field] = map_leaves(value, trace, skip=IDENTIFIERS)
                if field not in skipped:
                    words[index, field] = of_field
            traced.append(cast(Message, copy))
        written = write(traced)
        counts = Counter(written)
        dropped = []
        for (index, field), of_field in words.items():
            if not of_field:  # only texts that the template contains, or nothing
                text = pack(str(cast(Mapping[str, Any], conversation[index])[field]))
                gone = index in unwritten if field == "content" else text not in pack(written)
                of_field = [("\0", text)] if gone else []
            kept = [counts[mark] if len(mark) == 1 else len(word) * (mark in written) for mark, word in of_field]
            lost = [(word, len(word) - k) for (_, word), k in zip(of_field, kept, strict=True) if k < len(word)]
            missing = sum(count for _, count in lost)
            whole = missing == sum(len(word) for _, word in of_field)
            if missing:
                dropped.append(Dropped(index, field, missing, whole, " ".join(word for word, _ in lost)[:40]))
        return dropped

    def _trace(self, leaf: Any, *, marks: Iterator[str], words: list[tuple[str, str]]) -> Any:
        """Return a text with a mark for each word, or another number for a number; append the marks and words."""
        if isinstance(leaf, int | float) and not isinstance(leaf, bool):
            words.append((str(ord(next(marks))), str(leaf)))
            return int(words[-1][0])
        if not isinstance(leaf, str):
            return leaf

        def replace(match: re.Match[str]) -> str:
            words.append((next(marks), match[0]))
            return words[-1][0] * len(match[0])

        parts = self._split.split(leaf)
        parts[::2] = [re.sub(r"\S+", replace, part) for part in parts[::2]]
        return "".join(parts)


def _literals(template: str) -> Iterator[str]:
    """Yield the string constants of a template, which it can compare with the text of messages."""
    try:
        for _, kind, value in jinja2.Environment().lex(template):
            if kind == "string":
                yield value[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")
    except (jinja2.TemplateSyntaxError, UnicodeDecodeError):
        return
