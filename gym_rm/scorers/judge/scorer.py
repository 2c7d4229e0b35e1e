"""A chat model as the judge of replies: a score for each, comparisons, a score for each of a group, or a rubric."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from gym_rm.config import parse_settings
from gym_rm.errors import ConfigError
from gym_rm.generation.chat import LocalChatOptions, chat_options, open_chat_model_of
from gym_rm.plain_values import to_plain
from gym_rm.scorer import NeverCopied
from gym_rm.scorers.judge.asking import ask_all
from gym_rm.scorers.judge.call import JudgeCall, Judging
from gym_rm.scorers.judge.comparisons import BOTH_ORDERS, IN_ORDER, Comparisons
from gym_rm.scorers.judge.options import JudgeOptions
from gym_rm.scorers.judge.prompts import FencedQuestions, Mode
from gym_rm.scorers.judge.rubrics import read_rubric
from gym_rm.scorers.judge.styles import Style, StyleQuestions, load_style
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Prompts, Provenance

SCALE = (1.0, 10.0)
EFFECTIVE: dict[str, tuple[Mode, ...]] = {
    "comparisons": ("pairwise",),
    "both_orders": ("pairwise",),
    "min_comparisons": ("pairwise",),
    "list_size": ("listwise",),
    "scale": ("score", "listwise"),
}
"""Modes in which an option has an effect."""


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
    changed places) and `prefers_first` (share of the verdicts that are for the reply shown first, without ties). What
    the row cost, where a question about n rows counts 1 / n for each: `judge_questions`, `judge_answers` (with those
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
        style = load_style(str(options["style"])) if options.get("style") is not None else None
        schema = chat_options(model)
        if style is not None and "response_format" in style.chat.get("extra", {}) and schema is LocalChatOptions:
            raise ConfigError(
                f"style={options['style']!r} needs a server, which makes the model write JSON; pass its URL."
            )
        if style is not None and not style.modes:
            raise ConfigError(
                f"style={options['style']!r} is no chat model; load it with gym_rm.load_scorer(path, style=...)."
            )
        own = {name: value for name, value in options.items() if name in JudgeOptions.model_fields}
        chosen = parse_settings(JudgeOptions, own)  # what does not fit is refused before a model is loaded
        mode = _mode_of(chosen, style)
        _require_effect(chosen, mode, style)
        criteria = None if mode != "rubric" or chosen.rubric is None else read_rubric(chosen.rubric)
        self.options, self.model, self._owned = open_chat_model_of(
            model, options, JudgeOptions, owner="kind='judge'", defaults={} if style is None else style.chat_defaults
        )
        comparisons: Comparisons = chosen.comparisons or ("reference" if style is None else "all_pairs")
        twice = comparisons != "circular" if chosen.both_orders is None else chosen.both_orders
        text = None if mode == "rubric" else chosen.rubric
        scale = chosen.scale or SCALE
        self._judging = Judging(
            options=chosen,
            questions=FencedQuestions(text, mode=mode, scale=scale, marked=chosen.marked)
            if style is None
            else StyleQuestions(style, mode, rubric=text, principle=chosen.principle),
            mode=mode,
            comparisons=comparisons,
            orders=BOTH_ORDERS if twice else IN_ORDER,
            choices=mode == "pairwise" and (style is None or style.modes["pairwise"].is_choice),
            criteria=criteria,
        )
        model_options: Any = self.model.options if self._owned else None  # type: ignore[attr-defined]
        extra = getattr(model_options, "extra", {})
        temperature = extra.get("temperature", model_options.temperature) if self._owned else 1.0
        self._asks_again = style is None or temperature > 0  # a style asks the same again
        if chosen.samples > 1 and not temperature:
            raise ConfigError(f"samples={chosen.samples} would all be equal; pass temperature= above 0.")

    def __repr__(self) -> str:
        return f"JudgeScorer({self.model!r}, mode={self._judging.mode!r})"

    @property
    def provenance(self) -> Provenance:
        """The judge's model, and what it is asked."""
        made = getattr(self.model, "provenance", None) or Provenance("", type(self.model).__name__)
        judging, options = self._judging, self.options
        own: dict[str, Any] = {"mode": judging.mode, "rubric": judging.questions.digest}
        own |= options.settings
        names = ["reference", "samples", "marked" if options.style is None else "style"]
        names += [name for name in ("min_comparisons", "list_size") if judging.mode in EFFECTIVE[name]]
        own |= {name: to_plain(getattr(options, name)) for name in names}
        own |= {"scale": list(options.scale or SCALE)} if options.style is None else {}
        own |= {"relative": True} if self.relative else {}
        if judging.mode == "pairwise":
            own |= {"comparisons": judging.comparisons, "orders": len(judging.orders)}
        elif judging.mode == "rubric":
            own["rubric"] = [each.model_dump(mode="json") for each in judging.criteria or ()] or "of each row"
        return dataclasses.replace(made, scorer=type(self).__name__, settings={**made.settings, **own})

    @property
    def relative(self) -> bool:
        """Whether a reward depends on the other rows of a call; see `gym_rm.scorer.is_relative`."""
        judging = self._judging
        return judging.mode == "listwise" or (judging.mode == "pairwise" and judging.comparisons != "reference")

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Score N conversations that end with a reply.

        Raises:
            ScoringError: some rows have no verdict; the error's `scores` has the scores of the others.
            ConfigError: the judge cannot be used at all, for example because its server refuses the key.
        """
        return self.options.score(conversations, prompts, self._score)

    def _score(self, conversations: Sequence[Conversation], prompts: Prompts) -> Scores:
        options, deadline = self.options, time.monotonic() + self.options.timeout
        call = JudgeCall(self._judging, conversations, prompts if prompts is not None else [None] * len(conversations))
        ask_all(
            self.model,
            self._judging.questions,
            call.asks,
            max_retries=options.max_retries if self._asks_again else 0,
            timeout=options.timeout,
            deadline=deadline,
        )
        return dataclasses.replace(call.scores(), provenance=self.provenance).mark_failures().raise_for_errors()

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


def _mode_of(options: JudgeOptions, style: Style | None) -> Mode:
    """Return the mode that was asked for, or that fits the other options."""
    compared = options.comparisons is not None
    if style is not None:
        mode = options.mode or ("pairwise" if compared else next(iter(style.modes)))
        if mode not in style.modes:
            raise ConfigError(f"style={options.style!r} has no mode {mode!r}; expected one of {list(style.modes)}.")
        return mode
    listed = options.rubric is not None and not isinstance(options.rubric, str)
    mode = options.mode or ("rubric" if listed else "pairwise" if compared else "score")
    if listed != (mode == "rubric") and (listed or options.rubric is not None):
        raise ConfigError(
            f"rubric must be {'a list of criteria' if mode == 'rubric' else 'a text'} with mode={mode!r}."
        )
    return mode


def _require_effect(options: JudgeOptions, mode: Mode, style: Style | None) -> None:
    """Raise ConfigError if an option was given that has no effect."""
    for name in options.model_fields_set:
        if name in EFFECTIVE and mode not in EFFECTIVE[name]:
            raise ConfigError(f"{name} has no effect with mode={mode!r}; it is for {' and '.join(EFFECTIVE[name])}.")
        if style is not None and name == "marked":
            raise ConfigError(f"{name} has no effect with style={options.style!r}, which has a form of its own.")
        shown = style is not None and style.modes[mode].mentions(name)  # type: ignore[index]
        unused = name == "principle" or (name == "rubric" and style is not None)
        if unused and getattr(options, name) is not None and not shown:
            raise ConfigError(
                f"{name} has no effect with {f'style={options.style!r}' if style else 'questions of ours'}."
            )
