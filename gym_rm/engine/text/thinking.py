"""What of a reply is thinking, and what is its answer: for tags, for fields of messages and for harmony channels."""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from gym_rm.engine.text.messages import plain_content
from gym_rm.errors import ConfigError, ConversationError
from gym_rm.types import Message

KNOWN_TAGS = (
    *((f"<{word}>", f"</{word}>") for word in ("think", "thinking", "thought", "reasoning")),
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<seed:think>", "</seed:think>"),
)
FIELDS = ("reasoning_content", "reasoning", "reasoning_details", "thinking")
UNFINISHED = "the thinking of the reply has not ended, so it has no answer"

_CHANNELS = re.compile(r"\s*(?:<\|start\|>assistant)?<\|channel\|>")
_CHANNEL = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>\s*+(\w*+)[^<]*+(?:<\|constrain\|>[^<]*+)?<\|message\|>")
_END = re.compile(r"<\|(?:end|return|call)\|>\s*\Z")
_FENCE = re.compile(r"^[ \t>]*+(`{3,}+|~{3,}+)([^\n]*)$", re.MULTILINE)
_BACKTICKS = re.compile("`+")
_MARGIN = 80  # most characters of white space that are read around a tag
_ANY = -1  # instead of a pair of tags: the closing tag of any pair


class UnfinishedThinking(ConversationError):
    """The thinking of a reply has not ended, so the reply has no answer."""


class _Tag(NamedTuple):
    start: int
    end: int
    pair: int
    closes: bool
    in_code: bool


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a policy marks its thinking.

    In a text, a thought goes from an opening tag to the next closing tag of its pair. Tags in code (a closed fence, or
    backticks in a line) are text. So is an opening tag that neither begins a line nor follows a closing tag. A closing
    tag of no thought ends one that began before the text. A reply in harmony channels has the last `final` as its
    answer. Thinking can also be in a field of a message (`FIELDS`).

    Attributes:
        tags: pairs of an opening and a closing tag.
        opened: whether the chat template of the policy writes the opening tag, so that replies begin after it.

    Example:
        >>> Thinking().split({"role": "assistant", "content": "<think>2 + 2.</think>4"})
        ('2 + 2.', '4')
        >>> Thinking(opened=True).split({"role": "assistant", "content": "2 + 2. So"})
        ('2 + 2. So', None)
    """

    tags: tuple[tuple[str, str], ...] = KNOWN_TAGS
    opened: bool = False

    @classmethod
    def parse(cls, value: Any) -> Thinking:
        """Return what an option says: None, `"opened"`, `[open, close]` or `{"tags": [open, close], "opened": true}`.

        Raises:
            ConfigError: it is none of these.
        """
        if isinstance(value, Thinking):
            return value
        given = {"opened": True} if value == "opened" else value if isinstance(value, Mapping) else {"tags": value}
        tags, opened = given.get("tags"), given.get("opened", False)
        pair = tuple(tags) if isinstance(tags, Sequence) and not isinstance(tags, str) else ()
        is_pair = len(pair) == 2 and all(isinstance(tag, str) and tag.strip() for tag in pair) and pair[0] != pair[1]
        if not (tags is None or is_pair) or not isinstance(opened, bool) or set(given) - {"tags", "opened"}:
            raise ConfigError(
                "thinking must be None, 'opened', a list [opening tag, closing tag] or a dict {'tags': [opening tag, "
                f"closing tag], 'opened': true}}, got {value!r:.100}."
            )
        return cls(((pair[0], pair[1]),) if pair else KNOWN_TAGS, opened)

    @classmethod
    def of_template(cls, tokenizer: Any, **template_kwargs: Any) -> Thinking:
        """Return the thinking of a policy with the chat template of a tokenizer."""
        if not tokenizer.chat_template:
            return cls()
        chat = [{"role": "user", "content": "1"}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **template_kwargs)
        return cls(opened=bool(cls().opening(prompt)))

    @property
    def setting(self) -> Any:
        """The value of the option, for `Provenance`."""
        tags = None if self.tags == KNOWN_TAGS else list(self.tags[0])
        return ("opened" if self.opened else None) if tags is None else {"tags": tags, "opened": self.opened}

    def opening(self, prompt: str) -> str:
        """Return the opening tag at the end of a rendered prompt, with the white space after it; `""` without one."""
        text = prompt.rstrip()
        for match in _pattern(self.tags).finditer(text, max(0, len(text) - 64)):
            if match.end() == len(text) and cast(int, match.lastindex) % 2:
                return prompt[match.start() :]
        return ""

    def split(self, message: Mapping[str, Any]) -> tuple[str, str | None]:
        """Return the thinking and the answer of a message; the answer is None if the thinking has not ended.

        Raises:
            ConversationError: the content is no text.
        """
        content = plain_content(message.get("content"))
        if not isinstance(content, str | None):
            raise ConversationError(f"the content of the reply must be a text, got {content!r:.100}")
        fields = [message[name] for name in FIELDS if message.get(name) is not None]
        thinking, answer = self._split(content or "", opened=self.opened and not fields)
        texts = dict.fromkeys([text for field in fields for text in _texts(field)] + ([thinking] if thinking else []))
        if answer == "" and not thinking and texts and not message.get("tool_calls"):
            answer = None
        return "\n".join(texts), answer

    def answered(self, conversation: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return the conversation with the answers of its assistant turns alone: without thinking, also in fields.

        An earlier turn without an answer becomes empty. The tag that the template opened is only taken for granted in
        the last reply, because earlier ones can be part of the prompt.

        Raises:
            UnfinishedThinking: the last assistant turn has no answer.
            ConversationError: the content of an assistant turn is no text.
        """
        last = max((k for k, message in enumerate(conversation) if message.get("role") == "assistant"), default=-1)
        return [
            self._answer(message, is_last=k == last) if message.get("role") == "assistant" else cast(Message, message)
            for k, message in enumerate(conversation)
        ]

    def _answer(self, message: Mapping[str, Any], *, is_last: bool) -> Message:
        reader = self if is_last else Thinking(self.tags)
        _, answer = reader.split(message)
        if answer is None and is_last:
            raise UnfinishedThinking(UNFINISHED)
        content = plain_content(message.get("content")) or ""
        rest = {name: value for name, value in message.items() if name not in FIELDS}
        return cast(Message, {**rest, "content": content if content.strip() == answer else answer or ""})

    def _split(self, text: str, *, opened: bool) -> tuple[str, str | None]:
        if _CHANNELS.match(text):
            return _split_channels(text)
        tags = self._tags(text)
        closings: dict[tuple[int, bool], list[int]] = {}  # by pair, and whether it is in code
        for k, tag in enumerate(tags):
            for pair in (tag.pair, _ANY) if tag.closes else ():
                closings.setdefault((pair, tag.in_code), []).append(k)
        thoughts, parts = list[str](), list[str]()
        position, k, thought, ended = 0, 0, _ANY if opened else None, False
        while k < len(tags) or thought is not None:
            if thought is not None:
                # A stray fence in a thought must not hide where it ends.
                ends = (_next(closings.get((thought, in_code), []), k) for in_code in (False, True))
                end = next((each for each in ends if each is not None), None)
                thoughts.append(text[position : len(text) if end is None else tags[end].start])
                if end is None:
                    return _joined(thoughts), None
                position, k, thought, ended = tags[end].end, end + 1, None, True
                continue
            tag, k = tags[k], k + 1
            begins = not text[max(position, tag.start - _MARGIN) : tag.start].rpartition("\n")[2].strip()
            is_line = begins and not text[tag.end : tag.end + _MARGIN].partition("\n")[0].strip()
            if tag.closes and (not tag.in_code or (is_line and not ended)):
                thoughts += [*parts, text[position : tag.start]]
                parts, position, ended = [], tag.end, True
            elif begins and not tag.closes and not tag.in_code:
                parts.append(text[position : tag.start])
                position, thought = tag.end, tag.pair
        return _joined(thoughts), "".join([*parts, text[position:]]).strip()

    def _tags(self, text: str) -> list[_Tag]:
        matches = list(_pattern(self.tags).finditer(text))
        spans = _code(text) if matches else []
        starts = [start for start, _ in spans]
        tags = []
        for match in matches:
            k, group = bisect.bisect_right(starts, match.start()) - 1, cast(int, match.lastindex) - 1
            in_code = k >= 0 and match.start() < spans[k][1]
            tags.append(_Tag(*match.span(), group // 2, group % 2 == 1, in_code))
        return tags


@functools.lru_cache(maxsize=64)
def _pattern(tags: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    """Return what finds tags; of its groups, two belong to each pair. Plain words may have any case."""
    flags = ["(?i:%s)" if re.fullmatch(r"</?\w+>", tag) else "%s" for pair in tags for tag in pair]
    names = [re.escape(tag) for pair in tags for tag in pair]
    return re.compile("|".join(f"({flag % name})" for flag, name in zip(flags, names, strict=True)))


def _code(text: str) -> list[tuple[int, int]]:
    """Return where the closed fences, and the inline code outside of them, of a text are."""
    spans, opening, position = list[tuple[int, int]](), None, 0
    for match in _FENCE.finditer(text):
        if opening is None:
            opening = match if match[1][0] == "~" or "`" not in match[2] else None
        elif match[1].startswith(opening[1]) and not match[2].strip():
            spans += [*_inline_code(text, position, opening.start()), (opening.start(), match.end())]
            opening, position = None, match.end()
    return spans + _inline_code(text, position, len(text))


def _inline_code(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Return where a run of backticks and the next one of the same length in its line are."""
    runs = [match.span() for match in _BACKTICKS.finditer(text, start, end)]
    partners, nearest = list[int | None](), dict[int, int]()
    for k in reversed(range(len(runs))):
        if k + 1 < len(runs) and "\n" in text[runs[k][1] : runs[k + 1][0]]:
            nearest.clear()
        length = runs[k][1] - runs[k][0]
        partners.append(nearest.get(length))
        nearest[length] = k
    spans, k = list[tuple[int, int]](), 0
    while k < len(runs):
        partner = partners[-1 - k]
        spans += [] if partner is None else [(runs[k][0], runs[partner][1])]
        k = (k if partner is None else partner) + 1
    return spans


def _next(indices: Sequence[int], start: int) -> int | None:
    """Return the first of sorted indices that is at least `start`."""
    k = bisect.bisect_left(indices, start)
    return indices[k] if k < len(indices) else None


def _joined(thoughts: Sequence[str]) -> str:
    return "\n".join(filter(None, map(str.strip, thoughts)))


def _split_channels(text: str) -> tuple[str, str | None]:
    """Return the thinking and the answer of a reply in the harmony format of gpt-oss."""
    _, *pieces = _CHANNEL.split(text)
    names, bodies = pieces[::2], [_END.sub("", body).strip() for body in pieces[1::2]]
    final = max((k for k, name in enumerate(names) if name == "final"), default=None)
    answer = None if final is None else bodies.pop(final)
    return _joined(bodies), answer


def _texts(field: Any) -> list[str]:
    """Return the texts in a field with reasoning: a text, or a list of `{"type": ..., "text": ...}`."""
    parts = field if isinstance(field, list | tuple) else [field]
    texts = [part.get("text", part.get("summary")) if isinstance(part, Mapping) else part for part in parts]
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]
