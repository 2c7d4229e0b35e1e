"""A chat model as the judge of replies: a score for each, comparisons, a score for each of a group, or a rubric."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.errors import ConfigError
from gym_rm.generation.chat import LAST_TOKENS, LocalChatOptions, chat_options, open_chat_model_of
from gym_rm.scorer import NeverCopied, max_concurrent_calls
from gym_rm.scorers.judge.asking import ask
from gym_rm.scorers.judge.modes import MODES, JudgeMode
from gym_rm.scorers.judge.options import JudgeOptions, Mode
from gym_rm.scorers.judge.plan import JudgeRow
from gym_rm.scorers.judge.questions import Questions
from gym_rm.scorers.judge.styles import Style, load_style
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Prompts, Provenance

VARIABLES_OF = {
    "scale": ("low",),
    "marked": ("mark",),
    "principle": ("principle",),
    "rubric": ("rubric", "criterion"),
    "verdict": ("verdicts",),
}
"""The variables of a style's messages that an option fills."""


class JudgeScorer(NeverCopied):
    """Scores replies by the verdicts of a chat model.

    What is judged is data: it is fenced by lines with a mark that no judged text contains, and the judge must write
    this mark beside its verdict. A `style` has neither fences nor marks, as its model was trained. An answer without
    one clear verdict is asked for again, and is an error in the end, never a number. A comparison without a verdict is
    left out. Equal rows of a call get one verdict.

    The rewards of `mode="pairwise"` within a group and of `mode="listwise"` say how good a reply is beside the
    others of its group: pass whole groups (`group_size`), and use advantages within groups (`grpo`, `leave_one_out`).
    A rubric has a component for each criterion, by its name: its value, negative if the weight is.

    Infos: `judgement` (the last answer to the first question about the row); `disagreement` (standard deviation of the
    samples); for comparisons `position_consistent` (share of them whose verdict did not change when the two replies
    changed places), `prefers_first` (share of the verdicts that are for the reply shown first, without ties) and
    `judge_lead` (the verdicts for the reply less those against it, in both places, without a reference reply);
    by probabilities `verdict_mass` (of all verdicts) and `verdict_unknown` (the most that a server hid of it). What the
    row cost, where a question about n rows counts 1 / n for each: `judge_questions`, `judge_answers` (with those
    asked for again), `judge_unread` (questions without a verdict) and `judge_tokens` (NaN if the model does not count
    them).

    Args:
        model: folder or hub id of a chat model in this process, URL of an OpenAI-compatible server, a dict
            `{"path": ..., **options}`, or a `ChatModel`.
        **options: the fields of `JudgeOptions`, and those of `LocalChatOptions` or `RemoteChatOptions`.

    Raises:
        ConfigError: an option is unknown or invalid, or there is no such model.

    Example:
        >>> judge = JudgeScorer("http://127.0.0.1:8000", rubric="Is the reply polite?")  # doctest: +SKIP
        >>> judge.score(conversations).rewards  # doctest: +SKIP
    """

    def __init__(self, model: Any = None, **options: Any) -> None:
        model = options.pop("path", None) if model is None else model  # as other kinds are configured
        self.options, self.model, self._owned = open_chat_model_of(
            model,
            options,
            JudgeOptions,
            owner="kind='judge'",
            defaults=lambda chosen: self._prepare(model, chosen),  # what does not fit is refused before a model loads
        )
        chat: Any = self.model.options if self._owned else None  # type: ignore[attr-defined]
        temperature = getattr(chat, "extra", {}).get("temperature", chat.temperature) if self._owned else 1.0
        again = bool(self.questions.mode.ending) or temperature > 0  # without an ending, it asks the same
        self._asks_again = again and not self.questions.decides
        if self.questions.decides and not callable(getattr(self.model, "choose", None)):
            raise ConfigError(f"{self.model!r:.80} has no method choose, which verdict='probabilities' needs.")
        if self.options.samples > 1 and not temperature:
            raise ConfigError(f"samples={self.options.samples} would all be equal; pass temperature= above 0.")

    def _prepare(self, model: Any, options: JudgeOptions) -> Mapping[str, Any]:
        """Choose questions and mode, and return the style's defaults of the chat model's options."""
        self.mode = judge_mode(options)
        self.questions, style = self.mode.questions, self.mode.questions.style
        if "response_format" in style.chat.get("extra", {}) and chat_options(model) is LocalChatOptions:
            raise ConfigError(
                f"style={options.style!r} needs a server, which makes the model write JSON; pass its URL."
            )
        return {**style.chat_defaults, **({"max_new_tokens": LAST_TOKENS} if self.questions.decides else {})}

    def __repr__(self) -> str:
        return f"JudgeScorer({self.model!r}, mode={self.mode.name!r})"

    @property
    def provenance(self) -> Provenance:
        """The judge's model, and what it is asked."""
        made = getattr(self.model, "provenance", None) or Provenance("", type(self.model).__name__)
        options = self.options
        names = {"style", "reference", "samples", "marked", "scale"}
        own = {
            "mode": self.mode.name,
            "rubric": self.questions.digest,
            **options.model_dump(mode="json", include=names),
        }
        own |= {"verdict": options.verdict, "min_mass": options.min_mass} if self.questions.decides else {}
        own |= {**options.settings, **({"relative": True} if self.relative else {}), **self.mode.settings}
        return dataclasses.replace(made, scorer=type(self).__name__, settings={**made.settings, **own})

    @property
    def relative(self) -> bool:
        """Whether a reward depends on the other rows of a call; see `gym_rm.scorer.is_relative`."""
        return self.mode.relative

    @property
    def max_concurrent_calls(self) -> int:
        """That of the chat model; see `gym_rm.scorer.max_concurrent_calls`."""
        return max_concurrent_calls(self.model)

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Score N conversations that end with a reply.

        Raises:
            ScoringError: some rows have no verdict; the error's `scores` has the scores of the others.
            ConfigError: the judge cannot be used at all, for example because its server refuses the key.
        """
        options = self.options
        conversations, prompts, complete = options.read(conversations, prompts)
        rows = list(map(JudgeRow.read, conversations, prompts or [None] * len(conversations)))
        plan = self.mode.plan(rows)
        retries = options.max_retries if self._asks_again else 0
        answers = ask(self.model, self.questions, plan.questions, max_retries=retries, timeout=options.timeout)
        scores = dataclasses.replace(self.mode.tally(rows, plan, answers), provenance=self.provenance)
        return complete(scores).raise_for_errors()

    def sleep(self) -> None:
        """Free the device's memory; the next `score` moves the weights back."""
        self._call("sleep")

    def wake(self) -> None:
        """Undo `sleep`."""
        self._call("wake")

    def close(self) -> None:
        """Release the model, unless it was passed in loaded."""
        if self._owned:
            self._call("close")

    def _call(self, name: str) -> None:
        if callable(method := getattr(self.model, name, None)):
            method()


def judge_mode(options: JudgeOptions) -> JudgeMode:
    """Return what a judge asks. Raises ConfigError if its style is no chat model's, or an option has no effect."""
    style = load_style(options.style)
    if not style.modes:
        raise ConfigError(f"style={options.style!r} is no chat model; load it with load_scorer(path, style=...).")
    name = _mode_of(options, style)
    _require_effect(options, name, style)
    return MODES[name](Questions(style, name, options), options)


def _mode_of(options: JudgeOptions, style: Style) -> Mode:
    """Return the mode that was asked for, or that fits the other options."""
    listed = options.rubric is not None and not isinstance(options.rubric, str)
    likely: Mode = "rubric" if listed else "pairwise" if options.comparisons is not None else next(iter(style.modes))
    mode = options.mode or likely
    if mode not in style.modes:
        raise ConfigError(f"style={options.style!r} has no mode {mode!r}; expected one of {list(style.modes)}.")
    if options.rubric is not None and listed != (mode == "rubric"):
        raise ConfigError(
            f"rubric must be {'a list of criteria' if mode == 'rubric' else 'a text'} with mode={mode!r}."
        )
    return mode


def _require_effect(options: JudgeOptions, mode: Mode, style: Style) -> None:
    """Raise ConfigError if an option was given that has no effect."""
    shown = style.modes[mode].variables
    for name in options.model_fields_set:
        if name == "comparisons" and mode != "pairwise":
            raise ConfigError(f"comparisons has no effect with mode={mode!r}; it is for mode='pairwise'.")
        is_shown = {*VARIABLES_OF.get(name, ())} & shown or name not in VARIABLES_OF
        if getattr(options, name) is not None and not is_shown:
            raise ConfigError(
                f"{name} has no effect with style={options.style!r} and mode={mode!r}, whose questions do not show it."
            )
