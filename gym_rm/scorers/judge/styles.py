"""Public generative reward models by name: what they are asked, and how they answer.

Each has a small file in the folder `styles`, which says where its format was read. A file of the same form is a style
of your own: `style="my-judge.yaml"`.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pydantic
from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gym_rm.config import Config, Finite, PositiveInt, parse_settings
from gym_rm.documents import parse_yaml, read_mapping
from gym_rm.errors import ConfigError, nearest
from gym_rm.generation.chat import TOP_LOGPROBS
from gym_rm.scorers.judge.forms import VerdictForm
from gym_rm.scorers.judge.options import Mode

FORMS: dict[str, tuple[str, ...]] = {
    "score": ("last", "log_odds", "json_scores"),
    "pairwise": ("json_pair", "boxed_pair", "last", "json_scores"),
    "listwise": ("json_scores",),
    "rubric": ("last",),
}
FOLDER = Path(__file__).with_name("styles")
_MODELS = re.compile(r"^models:(?: .*|(?:\n +- .*)+)$", re.MULTILINE)
Need: TypeAlias = Literal["principle", "rubric", "reference"]
TEMPLATES = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
TEMPLATES.filters["json"] = functools.partial(json.dumps, ensure_ascii=False)


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
    """Lowest and highest value of a reply; with the variables `low` and `high` the default of the option `scale`."""
    ending: str = ""
    """Jinja source of how the answer must end: a variable of the messages, and what is said after an answer without a
    verdict. Empty to ask the same again."""

    @pydantic.model_validator(mode="after")
    def _require_messages(self) -> StyleMode:
        if not self.messages or self.scale[0] >= self.scale[1]:
            raise ValueError(f"expected at least one message and scale=(lowest, highest), got the scale {self.scale}")
        try:
            assert self.variables is not None
        except TemplateError as error:
            raise ValueError(f"a template is invalid: {error}") from error
        return self

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that its messages show."""
        sources = [each.content for each in self.messages if isinstance(each, StyleMessage)]
        return frozenset().union(*map(_variables_of, [*sources, self.ending]))

    @property
    def is_choice(self) -> bool:
        """Whether its verdict on two replies is a choice, not two scores."""
        return self.verdict.form == "last" and self.verdict.values is not None


def _variables_of(source: str) -> set[str]:
    return meta.find_undeclared_variables(TEMPLATES.parse(source))


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
    modes: dict[Mode, StyleMode] = pydantic.Field(default={})
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
