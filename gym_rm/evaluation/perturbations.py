"""Changes of a reply that do not make it better, for `gym_rm.evaluation.audit`."""

from __future__ import annotations

import importlib.resources
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Expected: TypeAlias = Literal["not higher", "lower"]
"""What the score may do: it must not rise, or it must fall."""

MOST_CHARACTERS = 48  # of a template in the name of a change
TABLE = "audit_changes.json"
FILLER = (
    "There is more than one way to look at this. As with many things, the details matter here. It is worth taking a "
    "moment to think about it. I hope that this helps. Please let me know if you have any other questions."
)
_SENTENCE = re.compile(r"(?<=[.!?。！？])\s+|\n+")
_WORD = re.compile(r"\S+")
_PLACE = re.compile(r"\{([a-z]+(?: [a-z]+)*)\}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Markup:
    """How a chat template writes the end of a turn, and the begin of the next turn of the user and the assistant."""

    end: str
    user: str
    assistant: str


# ChatML, Llama 3, Gemma, Mistral and Llama 2.
MARKUPS = (
    Markup("<|im_end|>", "\n<|im_start|>user\n", "\n<|im_start|>assistant\n"),
    Markup(
        "<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    Markup("<end_of_turn>", "\n<start_of_turn>user\n", "\n<start_of_turn>model\n"),
    Markup("</s>", "[INST] ", " [/INST] "),
)


def markup_of(scorer: Any) -> Markup:
    """Return the markup whose end token the scorer's tokenizer knows; ChatML if it has none of them."""
    tokenizer = getattr(getattr(scorer, "renderer", None), "tokenizer", None)
    known = tokenizer.get_vocab() if tokenizer is not None else {}
    return next((markup for markup in MARKUPS if markup.end in known), MARKUPS[0])


@dataclass(frozen=True, slots=True)
class ReplyToChange:
    """A reply to change, with what a change may need.

    Attributes:
        text: the reply.
        question: the last message before it.
        answer: the reference answer of the row, or None.
        others: good replies of another row.
        bad: worse replies of the same row.
        index: number of the row; it seeds the order of shuffled words.
        markup: the control tokens.
    """

    text: str
    question: str = ""
    answer: str | None = None
    others: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()
    index: int = 0
    markup: Markup = MARKUPS[0]


@dataclass(frozen=True, slots=True)
class Perturbation:
    """A change of a reply.

    Attributes:
        name: what the change does.
        group: kind of change.
        expected: what the score may do.
        apply: returns the changed replies; none where the change does not apply. An unchanged reply is left out by the
            caller. Of several, the one with the highest score counts.
        every: whether every good reply of a row is changed, and the best after is compared with the best before;
            otherwise only the first one is, in some rows first.
        says: what was done, in words that a sentence can begin with.
        control: returns the replies that are compared with the changed ones, by a milder change; None for good replies.
    """

    name: str
    group: str
    expected: Expected
    apply: Callable[[ReplyToChange], tuple[str, ...]]
    every: bool = False
    says: str = ""
    control: Callable[[ReplyToChange], tuple[str, ...]] | None = None


def sentences(text: str) -> list[str]:
    """Return the sentences and lines of a text.

    Example:
        >>> sentences("It is 4. I am sure!\\nThank you.")
        ['It is 4.', 'I am sure!', 'Thank you.']
    """
    return [part for part in _SENTENCE.split(text.strip()) if part]


# --- the table -------------------------------------------------------------------------------------------------------


def _all_but_the_last_sentence(reply: ReplyToChange) -> str | None:
    parts = sentences(reply.text)
    return reply.text.rstrip()[: -len(parts[-1])].rstrip() if len(parts) > 1 else None


def _first_half(reply: ReplyToChange) -> str | None:
    words = list(_WORD.finditer(reply.text))
    return reply.text[: words[(len(words) - 1) // 2].end()] if len(words) > 1 else None


def _shuffled(reply: ReplyToChange) -> str | None:
    words = reply.text.split()
    return " ".join(random.Random(reply.index).sample(words, len(words))) if len(words) > 2 else None


def _nth_sentence(number: int) -> Callable[[ReplyToChange], str | None]:
    """Return the part that is one sentence of several."""
    return lambda reply: parts[number] if len(parts := sentences(reply.text)) > 1 else None


# What a template may name beside `{reply}`. Where a part is None, or empty replies, the change does not apply.
PARTS: dict[str, Callable[[ReplyToChange], str | tuple[str, ...] | None]] = {
    "question": lambda reply: reply.question or None,
    "begin of the question": lambda reply: reply.question[:50] or None,
    "answer": lambda reply: reply.answer,
    "filler": lambda reply: FILLER,  # five sentences
    "as JSON": lambda reply: json.dumps({"answer": reply.text}),
    "first half": _first_half,
    "first sentence": _nth_sentence(0),
    "last sentence": _nth_sentence(-1),
    "all but the last sentence": _all_but_the_last_sentence,
    "shuffled words": _shuffled,
    "worse replies": lambda reply: reply.bad,
    "replies of another row": lambda reply: reply.others,
    "end of turn": lambda reply: reply.markup.end,
    "turn of the user": lambda reply: reply.markup.user,
    "turn of the assistant": lambda reply: reply.markup.assistant,
}


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Return a template with its parts; what is none of them stays."""
    return _PLACE.sub(lambda place: values.get(place[1], place[0]), template)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """An entry of the table. What is not empty is done to the reply in this order.

    Attributes:
        name: of the change; empty for the template.
        replace: a pattern and what stands in its place.
        letters: letters, and those that stand in their place.
        case: a method of `str`.
        sentence: template of each sentence, with `{n}` and `{part}`; `word` is that of each word.
        between: what is between these.
        text: template of the changed reply.
        expected: what the score may do.
        needs_answer: whether it applies to rows with a reference answer only.
        every: see `Perturbation`.
        than: the entry of the milder change.
    """

    name: str = ""
    replace: tuple[str, str] = ("", "")
    letters: tuple[str, str] = ("", "")
    case: str = ""
    sentence: str = ""
    word: str = ""
    between: str = ""
    text: str = "{reply}"
    expected: Expected = "not higher"
    needs_answer: bool = False
    every: bool = False
    than: Mapping[str, Any] | None = None

    def apply(self, reply: ReplyToChange) -> tuple[str, ...]:
        if self.needs_answer and reply.answer is None:
            return ()
        values = [{"reply": self._edited(reply.text)}]
        for name in {*_PLACE.findall(self.text)} & {*PARTS}:
            part = PARTS[name](reply)
            part = () if part is None else (part,) if isinstance(part, str) else part
            values = [each | {name: text} for each in values for text in part]
        return tuple(_filled(self.text, each) for each in values)

    def _edited(self, text: str) -> str:
        if self.replace[0]:
            text = re.sub(*self.replace, text)
        text = text.translate(str.maketrans(*self.letters))
        text = getattr(text, self.case)() if self.case else text
        if each := self.sentence or self.word:
            parts = sentences(text) if self.sentence else text.split()
            numbered = enumerate(parts, 1)
            text = self.between.join(each.replace("{n}", f"{n}").replace("{part}", part) for n, part in numbered)
        return text

    def change(self, group: str) -> Perturbation:
        """Return the change; its name, where the entry has none, is the template."""
        name = self.name or " ".join(self.text.replace("{reply}", "…").split())
        name = name if len(name) <= MOST_CHARACTERS else f"{name[:MOST_CHARACTERS]}…"
        before, _, after = (repr(each) if each else "" for each in self.text.partition("{reply}"))
        added = [f"{text} {where} the reply" for text, where in ((before, "in front of"), (after, "behind")) if text]
        says = self.name or " and ".join(added)
        says, control = says[:1].upper() + says[1:], None if self.than is None else _Entry(**self.than).apply
        return Perturbation(name, group, self.expected, self.apply, self.every, says, control)


def _table() -> tuple[Perturbation, ...]:
    text = importlib.resources.files("gym_rm").joinpath("assets", TABLE).read_text(encoding="utf-8")
    return tuple(
        _Entry(**({"text": entry} if isinstance(entry, str) else entry)).change(group)
        for group, entries in json.loads(text).items()
        for entry in entries
    )


CHANGES: tuple[Perturbation, ...] = _table()
"""Every change that an audit tries, of structure and of wording, in groups."""
