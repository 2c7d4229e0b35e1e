"""Public generative reward models by name: what they are asked, and how they answer.

Each has a small file in the folder `styles`, which says where its format was read. A file of the same form is a style
of your own: `style="my-judge.yaml"`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pydantic
from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gym_rm.config import Config, Finite, PositiveInt, parse_settings
from gym_rm.documents import parse_yaml, read_mapping
from gym_rm.errors import ConfigError, ConversationError, nearest
from gym_rm.generation.chat import ChatReply
from gym_rm.plain_values import to_plain
from gym_rm.scorers.judge.forms import VerdictForm, read_verdict
from gym_rm.scorers.judge.prompts import Mode, Question, Shown, text_of
from gym_rm.types import Conversation, Message

FORMS = {
    "score": ("boxed", "last", "log_odds", "json_scores"),
    "pairwise": ("json_pair", "boxed_pair", "last", "json_scores"),
    "listwise": ("json_scores",),
}
TOP_LOGPROBS = 20  # the most that vLLM tells
FOLDER = Path(__file__).with_name("styles")
_MODELS = re.compile(r"^models:(?: .*|(?:\n +- .*)+)$", re.MULTILINE)
Need: TypeAlias = Literal["principle", "rubric", "reference"]


class StyleMessage(Config):
    """One message to the judge."""

    role: str
    """Its role; those of NVIDIA's models (`response_1`, ...) exist only in the chat templates of these models."""
    content: str
    """Jinja source."""
    when: str | None = None
    """Variable without which the message is left out."""


class StyleMode(Config):
    """One way to ask a model."""

    messages: tuple[Literal["conversation"] | StyleMessage, ...]
    """The messages; `conversation` stands for those before the reply, as they are."""
    verdict: VerdictForm
    """How its answer ends."""
    scale: tuple[Finite, Finite] = (0.0, 1.0)
    """Lowest and highest value of a reply."""

    @pydantic.model_validator(mode="after")
    def _require_messages(self) -> StyleMode:
        if not self.messages or self.scale[0] >= self.scale[1]:
            raise ValueError(f"expected at least one message and scale=(lowest, highest), got the scale {self.scale}")
        return self

    def mentions(self, variable: str) -> bool:
        """Return whether a message shows a variable."""
        return any(variable in each.content for each in self.messages if isinstance(each, StyleMessage))

    @property
    def is_choice(self) -> bool:
        """Whether its verdict on two replies is a choice, not two scores."""
        return self.verdict.form == "last" and self.verdict.values is not None


class Forward(Config):
    """How this package computes the reward itself, where it is a value of a forward pass."""

    kind: Literal["generative", "reference"]
    """`generative`: log-odds of two answers; `reference`: a scalar of a text that has a reference reply too."""
    question: str = ""
    """The question, with `{principle}`."""
    answers: tuple[str, str] = ("Yes", "No")
    """The two answers."""
    text: str = ""
    """Jinja source of what the model reads, with the texts `prompt`, `reference` and `reply`."""


class Style(Config):
    """A public generative reward model; see the files in the folder `styles`."""

    about: str
    """What it is, in one line."""
    source: str
    """Where the format was read."""
    models: tuple[str, ...] = ()
    """Regular expressions of the names of its models."""
    context: PositiveInt | None = None
    """Most tokens that it reads; None if it is not known."""
    serve: str = ""
    """How to serve it."""
    chat: dict[str, Any] = pydantic.Field(default={})
    """Defaults of the chat model's options."""
    needs: tuple[Need, ...] = ()
    """What must be given, by the option or by the data row."""
    rubric: str | None = None
    """Default of the option `rubric`."""
    modes: dict[Literal["score", "pairwise", "listwise"], StyleMode] = pydantic.Field(default={})
    """How it is asked; the first is the default."""
    forward: Forward | None = None
    """How the package computes its reward without a chat."""
    refused: str | None = None
    """Why it cannot be used, and what to do instead."""

    @property
    def chat_defaults(self) -> dict[str, Any]:
        """Defaults of the chat model's options, with the log-probabilities that its verdicts need."""
        needs = any(mode.verdict.form == "log_odds" for mode in self.modes.values())
        return {**({"top_logprobs": TOP_LOGPROBS} if needs else {}), **self.chat}

    @pydantic.model_validator(mode="after")
    def _require_some_way(self) -> Style:
        if not (self.modes or self.forward or self.refused):
            raise ValueError("a style needs modes, forward or refused")
        for name, mode in self.modes.items():
            forms = FORMS[name]
            if mode.verdict.form not in forms or (
                name == "pairwise" and mode.verdict.form == "last" and not mode.is_choice
            ):
                raise ValueError(
                    f"modes.{name}: the form of the verdict must be one of {forms}, got {mode.verdict.form}"
                )
        return self


def style_names() -> list[str]:
    """Return the names of all styles that can be used."""
    names = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    return [name for name in names if _read(FOLDER / f"{name}.yaml").refused is None]


def load_style(style: str) -> Style:
    """Return a style by its name, or from a file.

    Raises:
        ConfigError: there is no such style, the file is malformed, or the model is known but cannot be used.
    """
    is_file = style.endswith((".yaml", ".yml"))
    path = Path(style) if is_file else FOLDER / f"{style}.yaml"
    if not is_file and not path.is_file():
        names = style_names()
        raise ConfigError(f"style={style!r} is not known.{nearest(style, names)} Known styles: {', '.join(names)}.")
    found = parse_settings(Style, read_mapping(path, "the style")) if is_file else _read(path)
    if found.refused is not None:
        raise ConfigError(f"{found.about} cannot be used by name. {found.refused}")
    return found


@functools.lru_cache(maxsize=64)
def _read(path: Path) -> Style:
    return parse_settings(Style, read_mapping(path, "the style"))


def style_of_model(model: str) -> str | None:
    """Return the name of the style of a public model, None if the model is not one of them.

    Raises:
        ConfigError: the model is known, but cannot be used.
    """
    name = re.split(r"[\\/]", model.rstrip("\\/"))[-1]
    for style, patterns in _patterns().items():
        if any(re.fullmatch(pattern, name, re.IGNORECASE) for pattern in patterns):
            load_style(style)
            return style
    return None


@functools.cache
def _patterns() -> dict[str, list[str]]:
    """Return the patterns of all styles. Only this part of the files is parsed, because YAML takes long."""
    parts = {path.stem: _MODELS.search(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yaml"))}
    return {style: parse_yaml(part[0])["models"] for style, part in parts.items() if part is not None}


class StyleQuestions:
    """The questions of a style.

    Args:
        style: the style.
        mode: one of its modes.
        rubric: text of the field `rubric`, after that of the data row; None for the style's own.
        principle: text of the field `principle`, after that of the data row.
    """

    def __init__(self, style: Style, mode: Mode, *, rubric: str | None = None, principle: str | None = None) -> None:
        self.style, self._mode = style, style.modes[mode]  # type: ignore[index]
        self._rubric, self._principle = rubric, principle
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        environment.filters["json"] = functools.partial(json.dumps, ensure_ascii=False)
        try:
            self._templates: list[Template | None] = [
                None if isinstance(each, str) else environment.from_string(each.content) for each in self._mode.messages
            ]
        except TemplateError as error:
            raise ConfigError(f"the style has an invalid template: {error}.") from error

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of everything that it writes."""
        parts = [self._mode.model_dump(mode="json"), self._rubric or self.style.rubric, self._principle]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def question(self, shown: Shown) -> Question:
        """Return the question. Raises ConversationError if the row lacks what the style needs."""
        texts = [_text(reply) for reply in shown.replies]
        data = {} if shown.prompt is None else shown.prompt.metadata
        # A field that the style does not show is for another scorer.
        own = {name: _text_field(data, name) for name in ("principle", "rubric") if self._mode.mentions(name)}
        variables: dict[str, Any] = {
            "conversation": [to_plain(dict(message)) for message in shown.before],
            "question": shown.before[-1]["content"] if shown.before else "",
            "trajectories": [to_plain([dict(message) for message in reply]) for reply in shown.replies],
            "replies": texts,
            "reply": texts[0],
            "reply_a": texts[0],
            "reply_b": texts[-1],
            "reference": shown.reference,
            "principle": own.get("principle") or self._principle,
            "rubric": own.get("rubric") or self._rubric or self.style.rubric,
        }
        for need in self.style.needs:
            if not variables[need]:
                where = "`answer`" if need == "reference" else f"`{need}`"
                how = "" if need == "reference" else f" or the option {need}="
                raise ConversationError(f"the judge needs a {need}: the field {where} of the data row{how}")
        messages: list[Message] = []
        for each, template in zip(self._mode.messages, self._templates, strict=True):
            if isinstance(each, str) or template is None:
                messages += variables["conversation"]
            elif each.when is None or variables.get(each.when):
                try:
                    messages.append(Message(role=each.role, content=template.render(variables)))
                except (TemplateError, TypeError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
                    raise ConversationError(f"the style's message {each.role!r} cannot be written: {error}") from error
        return Question(tuple(messages), len(shown.replies), shown)

    def read(self, reply: ChatReply, question: Question) -> tuple[float, ...]:
        """Return the values of an answer. Raises NoVerdict if it has none, or no clear one."""
        return read_verdict(reply, self._mode.verdict, size=question.size, scale=self._mode.scale)

    def again(self, question: Question) -> str | None:
        """Return None, to ask the same again: these models were not trained on a second question."""
        return None


def _text(messages: Conversation) -> str:
    """Return the text of a reply; of several messages, with their roles."""
    if len(messages) == 1:
        return text_of(messages[0])
    return "\n\n".join(f"[{message['role']}]\n{text_of(message)}" for message in messages)


def _text_field(data: Mapping[str, Any], name: str) -> str | None:
    """Return a field of a data row that must be a text. Raises ConversationError if it is something else."""
    value = data.get(name)
    if value is not None and not isinstance(value, str):
        raise ConversationError(f"the field `{name}` of the data row must be a text for this style, got {value!r:.80}")
    return value or None
