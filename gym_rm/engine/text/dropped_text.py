"""Find the text of messages that a chat template does not write.

A template may drop a message (a role that it does not know), a field (`tool_calls`) or a part of a text (everything
before `</think>`). It may also trim, escape or upper-case text, which is not a loss.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import jinja2

from gym_rm.engine.text.control_tokens import ControlTokens
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.messages import extra_fields, map_leaves, split_tools, texts_of, with_tools
from gym_rm.engine.text.templates import ChatTemplate
from gym_rm.errors import ConversationError, warn_once
from gym_rm.types import Conversation, Message

REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})
IDENTIFIERS = frozenset({"id", "type", "index", "tool_call_id"})  # they connect messages; many templates omit them
TOOL_ROLES = frozenset({"tool", "function", "ipython"})  # their `name` identifies the call, like `tool_call_id`
MARKS = range(0x20000, 0x2A6DE)  # rare ideographs, which templates print as they are, also inside JSON and Python
LONGEST_LITERAL = 64
REMEMBERED_FRAMES, REMEMBERED_TURNS = 4096, 64


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


@dataclass(frozen=True, slots=True)
class Frame:
    """What a template writes around the texts of a conversation.

    Attributes:
        parts: its text without white space, with the numbers of the contents of messages (and steps) in their places.
        control_tokens: the control tokens, in order.
        unwritten: indices of the messages whose content it does not write.
    """

    parts: tuple[str | int, ...]
    control_tokens: tuple[str, ...]
    unwritten: frozenset[int]

    def holds(self, texts: list[str], written: str) -> bool:
        """Return whether `written` is this frame with all of these texts in it, except for white space."""
        filled = "".join(texts[part] if isinstance(part, int) else part for part in self.parts)
        return not self.unwritten and _pack(filled) == _pack(written)


class DroppedText:
    """Finds text that a chat template does not write.

    If a text is not what the template writes around other messages of the same roles, the conversation is written once
    more, with a rare character for every word, to look for these characters. Texts that the template's source contains
    are not replaced, because the template may react to them.
    """

    def __init__(
        self,
        template: ChatTemplate,
        control: ControlTokens,
        input_format: InputFormat,
        *,
        dropped_text: Literal["error", "warn"],
    ) -> None:
        self._template, self._control, self._input_format = template, control, input_format
        self._dropped_text = dropped_text
        self._frames: dict[tuple[Any, ...], Frame] = {}
        kept = {text for text in _literals(template.all_sources) if text.strip() and len(text) <= LONGEST_LITERAL}
        kept -= {text for text in kept if len(text) == 1 and text.isalnum()}
        ordered = sorted(kept, key=lambda text: (-len(text), text))
        self._split = re.compile(f"({'|'.join(map(re.escape, ordered)) or '(?!)'})")

    def count(self, conversation: Conversation, written: str) -> int:
        """Return the number of characters in messages that are not in the text that the template wrote.

        Raises:
            ConversationError: the template drops text, and the option `dropped_text` does not allow it.
        """
        frame, (tools, messages) = self.frame(conversation), split_tools(conversation)
        start = len(conversation) - len(messages)
        if not any(map(extra_fields, messages)) and frame.holds(self._texts(conversation), written):
            return 0
        unwritten = {index - start for index in frame.unwritten}
        dropped = self._find(messages, tools, unwritten)
        for missing in dropped:
            role = messages[missing.index]["role"]
            last = missing.index == len(messages) - 1
            of_reply = missing.field == "content" and role == "assistant" and missing.index not in unwritten
            reasoning = not last and (missing.field in REASONING or of_reply)
            if self._dropped_text == "error" and (last or missing.whole) and not reasoning:
                raise missing.error(role)
        if dropped:
            warn_once(
                f"the chat template of {self._template.name!r} does not write all text of the messages (for "
                "example the reasoning of earlier replies). The rest is not scored; "
                "Scores.infos['dropped_characters'] has the number of missing characters."
            )
        return sum(missing.characters for missing in dropped)

    def frame(self, conversation: Conversation) -> Frame:
        """Return what the template writes around the texts of a conversation with these roles and steps."""
        present = [bool(text) and not text.isspace() for text in self._texts(conversation)]
        tools, messages = split_tools(conversation)
        key = (None if tools is None else json.dumps(tools), *(each["role"] for each in messages), *present)
        frame = self._frames.get(key)
        if frame is None:
            frame = self._measure(conversation, present)
            if len(conversation) <= REMEMBERED_TURNS and not any(map(extra_fields, messages)):
                if len(self._frames) >= REMEMBERED_FRAMES:
                    self._frames.clear()
                self._frames[key] = frame
        return frame

    def _texts(self, conversation: Conversation) -> list[str]:
        """Return the contents of the messages; of the last one, its steps if the kind of reward model reads them."""
        contents = [message["content"] for message in conversation]
        return [*contents[:-1], *(self._input_format.steps(conversation) or contents[-1:])]

    def _measure(self, conversation: Conversation, present: list[bool]) -> Frame:
        marks = [f"{1000 + k}{str(1000 + k)[::-1]}" if has else "" for k, has in enumerate(present)]
        last = self._input_format.step_separator.join(marks[len(conversation) - 1 :])
        contents = [*marks[: len(conversation) - 1], last]
        neutral = [self._control.neutral(m, content) for m, content in zip(conversation, contents, strict=True)]
        text = self._template.write(neutral)
        numbers = {mark: number for number, mark in enumerate(marks) if mark}
        pieces = re.split(f"({'|'.join(numbers) or '(?!)'})", text)
        parts = [numbers[piece] if k % 2 else _pack(piece) for k, piece in enumerate(pieces)]
        unwritten = {min(number, len(conversation) - 1) for number in numbers.values() if number not in parts}
        return Frame(tuple(parts), self._control.find(text), frozenset(unwritten))

    def _find(self, messages: Conversation, tools: list[Any] | None, unwritten: set[int]) -> list[Dropped]:
        """Return the text that the template drops, by message and field."""
        used = set().union(*(text for message in messages for text in texts_of(message)))
        marks = itertools.cycle([char for char in map(chr, MARKS) if char not in used])
        words: dict[tuple[int, str], list[tuple[str, str]]] = {}  # (mark, word) by message and field
        traced: list[Message] = []
        for index, message in enumerate(messages):
            copy: dict[str, Any] = {"role": message["role"]}
            skipped = IDENTIFIERS | {"name"} if message["role"] in TOOL_ROLES else IDENTIFIERS
            for field in ("content", *extra_fields(message)):
                of_field: list[tuple[str, str]] = []
                trace = functools.partial(self._trace, marks=marks, words=of_field)
                copy[field] = map_leaves(cast(Mapping[str, Any], message)[field], trace, skip=IDENTIFIERS)
                if field not in skipped:
                    words[index, field] = of_field
            traced.append(cast(Message, copy))
        written = self._template.write(with_tools(traced, tools or ()))
        counts = Counter(written)
        dropped = []
        for (index, field), of_field in words.items():
            if not of_field:  # only texts that the template contains, or nothing
                text = _pack(str(cast(Mapping[str, Any], messages[index])[field]))
                gone = index in unwritten if field == "content" else text not in _pack(written)
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


def _pack(text: str) -> str:
    """Return the text without white space."""
    return "".join(text.split())


def _literals(template: str) -> Iterator[str]:
    """Yield the string constants of a template, which it can compare with the text of messages."""
    try:
        for _, kind, value in jinja2.Environment().lex(template):
            if kind == "string":
                yield value[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")
    except (jinja2.TemplateSyntaxError, UnicodeDecodeError):
        return
