"""What of a reply is thinking, and what is its answer: for tags, for fields of messages and for harmony channels."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from gym_rm.engine.text.messages import part_text, plain_message
from gym_rm.errors import ConfigError, ConversationError
from gym_rm.types import Message

KNOWN_TAGS = (
    *((f"<{word}>", f"</{word}>") for word in ("think", "thinking", "thought", "reasoning", "seed:think")),
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("◁think▷", "◁/think▷"),  # Kimi
)
FIELDS = ("reasoning_content", "reasoning", "reasoning_details", "thinking")
UNFINISHED = "the thinking of the reply has not ended, so it has no answer"

_CHANNELS = re.compile(r"\s*(?:<\|start\|>assistant)?<\|channel\|>")
_CHANNEL = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>\s*+(\w*+)[^<]*+(?:<\|constrain\|>[^<]*+)?<\|message\|>")
_END = re.compile(r"<\|(?:end|return|call)\|>\s*\Z")
_FENCE = re.compile(r"^[ \t>]*+(?P<mark>`{3,}+(?=[^\n`]*$)|~{3,}+)(?P<rest>[^\n]*)$", re.MULTILINE)
_INLINE = re.compile(r"(?<!`)(`++)[^`\n]++\1(?!`)")
_ANY = -1  # instead of a pair of tags: the closing tag of any pair


class _Tag(NamedTuple):
    start: int
    end: int
    pair: int
    closes: bool
    in_code: bool


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a policy marks its thinking.

    A thought goes from an opening tag to the next closing tag of its pair. Tags in code (a closed fence, or backticks
    in a line) are text. So is an opening tag that neither begins a line nor follows a closing tag. A first closing
    tag of no thought ends one that began before the text; later ones are text. A reply in harmony channels has the
    last `final` as its answer. Thinking can also be in a field of a message (`FIELDS`).

    Attributes:
        tags: pairs of an opening and a closing tag.
        opened: whether the chat template of the policy writes the opening tag, so that replies begin after it.

    Example:
        >>> Thinking().split({"content": "<think>2 + 2.</think>4"}), Thinking(opened=True).split({"content": "2 + 2."})
        (('2 + 2.', '4'), ('2 + 2.', None))
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
        given: Mapping[str, Any]
        given = {"opened": True} if value == "opened" else value if isinstance(value, Mapping) else {"tags": value}
        tags, opened = given.get("tags"), given.get("opened", False)
        pair = tuple(tags) if isinstance(tags, list | tuple) else ()
        is_pair = len(pair) == 2 and pair[0] != pair[1] and all(isinstance(tag, str) and tag for tag in pair)
        if not (tags is None or is_pair) or not isinstance(opened, bool) or not set(given) <= {"tags", "opened"}:
            raise ConfigError(
                "thinking must be None, 'opened', a list [opening tag, closing tag] or a dict {'tags': [opening tag, "
                f"closing tag], 'opened': true}}, got {value!r:.100}."
            )
        return cls(KNOWN_TAGS if tags is None else (pair,), opened)

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
        if self.tags == KNOWN_TAGS:
            return "opened" if self.opened else None
        return {"tags": list(self.tags[0]), "opened": self.opened}

    def opening(self, prompt: str) -> str:
        """Return the opening tag at the end of a rendered prompt, with the white space after it; `""` without one."""
        text = prompt.rstrip()
        matches = _pattern(self.tags).finditer(text, max(0, len(text) - 64))
        opens = (match for match in matches if match.end() == len(text) and (match.lastindex or 0) % 2)
        return next((prompt[match.start() :] for match in opens), "")

    def split(self, message: Mapping[str, Any]) -> tuple[str, str | None]:
        """Return the thinking and the answer of a message; the answer is None if the thinking has not ended.

        Raises:
            ConversationError: the content is no text.
        """
        message = plain_message(message)
        content = message.get("content")
        if not isinstance(content, str | None):
            raise ConversationError(f"the content of the reply must be a text, got {content!r:.100}")
        fields = [message[name] for name in FIELDS if message.get(name)]
        thinking, answer = self._split(content or "", opened=self.opened and not fields)
        texts = dict.fromkeys(text for text in [*map(_field_text, fields), thinking] if text)
        if answer == "" and not thinking and texts and not message.get("tool_calls"):
            answer = None
        return "\n".join(texts), answer

    def answered(self, conversation: Sequence[Mapping[str, Any]]) -> tuple[list[Message], str, str | None]:
        """Return the conversation with the answers of its assistant turns alone, and what `split` returns of the last.

        A turn without an answer becomes empty. That the template opened the tag is only taken for granted in the last
        reply, because earlier ones can be part of the prompt. Without an assistant turn, the last is one without text.

        Raises:
            ConversationError: the content of an assistant turn is no text.
        """
        messages = [dict(plain_message(message)) for message in conversation]
        replies = [message for message in messages if message.get("role") == "assistant"]
        earlier = Thinking(self.tags)
        thought, answer = "", None if replies else ""
        for reply in replies:
            thought, answer = (self if reply is replies[-1] else earlier).split(reply)
            if (reply.get("content") or "").strip() != answer:
                reply["content"] = answer or ""
            for name in FIELDS:
                reply.pop(name, None)
        return cast("list[Message]", messages), thought, answer

    def _split(self, text: str, *, opened: bool) -> tuple[str, str | None]:
        if _CHANNELS.match(text):
            return _split_channels(text)
        tags = _tags(text, self.tags)
        last = {(pair, tag.in_code): k for k, tag in enumerate(tags) if tag.closes for pair in (tag.pair, _ANY)}
        thoughts, parts = list[str](), list[str]()
        position, k, thought, ended = 0, 0, _ANY if opened else None, False
        while k < len(tags) or thought is not None:
            if thought is not None:
                in_code = last.get((thought, False), -1) < k  # a stray fence in a thought must not hide where it ends
                ends = (j for j in range(k, len(tags)) if tags[j].closes and tags[j].in_code == in_code)
                end = next((j for j in ends if thought in (_ANY, tags[j].pair)), None)
                if end is None:
                    return _joined([*thoughts, text[position:]]), None
                thoughts.append(text[position : tags[end].start])
                position, k, thought, ended = tags[end].end, end + 1, None, True
                continue
            tag, k = tags[k], k + 1
            begins = not text[max(position, tag.start - 80) : tag.start].rpartition("\n")[2].strip()
            is_line = begins and not text[tag.end : tag.end + 80].partition("\n")[0].strip()
            if tag.closes and not ended and (is_line or not tag.in_code):
                thoughts += [*parts, text[position : tag.start]]
                parts, position, ended = [], tag.end, True
            elif begins and not tag.closes and not tag.in_code:
                parts.append(text[position : tag.start])
                position, thought = tag.end, tag.pair
        return _joined(thoughts), "".join([*parts, text[position:]]).strip()


@functools.lru_cache(maxsize=64)
def _pattern(tags: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    """Return what finds tags; of its groups, two belong to each pair. Plain words may have any case."""
    escaped = [(tag, re.escape(tag)) for pair in tags for tag in pair]
    return re.compile(
        "|".join(f"((?i:{text}))" if tag.strip("</>").isalpha() else f"({text})" for tag, text in escaped)
    )


def _tags(text: str, pairs: tuple[tuple[str, str], ...]) -> list[_Tag]:
    matches = list(_pattern(pairs).finditer(text))
    outside = {match.start() for match in _pattern(pairs).finditer(_without_code(text))} if matches else set()
    groups = [(match.lastindex or 1) - 1 for match in matches]
    found = zip(matches, groups, strict=True)
    return [_Tag(*match.span(), group // 2, group % 2 == 1, match.start() not in outside) for match, group in found]


def _without_code(text: str) -> str:
    """Return a text of the same length in which closed fences and inline code are blank."""
    pieces, position, fence = list[str](), 0, None
    for match in _FENCE.finditer(text):
        if fence is None:
            fence = match
        elif match["mark"].startswith(fence["mark"]) and not match["rest"].strip():
            pieces += [text[position : fence.start()], "\n" * (match.end() - fence.start())]
            fence, position = None, match.end()
    return _INLINE.sub(lambda match: " " * len(match[0]), "".join([*pieces, text[position:]]))


def _joined(thoughts: Sequence[str]) -> str:
    return "\n".join(filter(None, map(str.strip, thoughts)))


def _split_channels(text: str) -> tuple[str, str | None]:
    """Return the thinking and the answer of a reply in the harmony format of gpt-oss."""
    _, *pieces = _CHANNEL.split(text)
    names, bodies = pieces[::2], [_END.sub("", body).strip() for body in pieces[1::2]]
    final = max((k for k, name in enumerate(names) if name == "final"), default=None)
    if final is not None:
        answer: str | None = bodies.pop(final)
    elif names[-1:] == ["commentary"]:  # a call of a tool, and what the user was told before it
        answer = _joined([body for name, body in zip(names, bodies, strict=True) if name == "commentary"])
        bodies = [body for name, body in zip(names, bodies, strict=True) if name != "commentary"]
    else:
        answer = None
    return _joined(bodies), answer


def _field_text(field: Any) -> str:
    """Return the text of a field with thinking: a text, or a list of texts or `{"type": ..., "text": ...}`."""
    return _joined([part_text(part) for part in (field if isinstance(field, list | tuple) else [field])])
