"""Rewards shaped by what else is in their group: length of thinking and answer, brevity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import numpy as np
import pydantic
import regex

from gym_rm.config import Config, Finite, parse_settings
from gym_rm.engine.text.messages import reply_text
from gym_rm.engine.text.thinking import Thinking
from gym_rm.errors import ConversationError, RowError
from gym_rm.scorer import ScorerLike
from gym_rm.scorers.combined import CombinedScorer
from gym_rm.scorers.groups import groups_of
from gym_rm.scores import RewardArray, Scores
from gym_rm.types import Conversation, Prompts

Coefficient: TypeAlias = Annotated[Finite, pydantic.Field(ge=0)]
Lengths: TypeAlias = "Sequence[float | None]"  # of the rows of a group; None counts as the longest

TERMS = {
    "thinking_length": "thinking",
    "answer_length": "answer",
    "thinking_bonus": "thinking",
    "answer_bonus": "answer",
    "length_reward": "reply",
}
"""The terms in the order in which they are added, and what each compares."""

_INVISIBLE = regex.compile(r"[\s\p{Cf}]+")


class ShapingOptions(Config):
    """Options of `kind="shaped"`. A term with the coefficient 0 is left out."""

    thinking_length: Coefficient = 0.0
    """Coefficient of the group weight (`group_weights`) of the length of the thinking."""
    answer_length: Coefficient = 0.0
    """Coefficient of the group weight of the length of the answer."""
    thinking_bonus: Coefficient = 0.0
    """Bonus for the shortest thinking among the best replies of the group (`shortest_of_the_best`)."""
    answer_bonus: Coefficient = 0.0
    """Bonus for the shortest answer among the best replies of the group."""
    top_share: Finite = pydantic.Field(default=0.2, gt=0, le=1)
    """Share of the group that is among the best, for the two bonuses."""
    length_reward: Coefficient = 0.0
    """Coefficient of Kimi k1.5's length reward (`length_rewards`) of thinking and answer together."""
    right_at_least: Finite = 1.0
    """A reply is right, for `length_reward`, if the reward of the scorer is at least this."""
    thinking: Any = None
    """How replies mark their thinking, see `gym_rm.engine.text.thinking.Thinking.parse`."""


class ShapedScorer(CombinedScorer):
    """The reward of one scorer plus terms that compare a reply with the others of its group.

    `reward = scorer + thinking_length + answer_length + thinking_bonus + answer_bonus + length_reward`. Each term is a
    component, with its coefficient in it, and 0 for a row alone in its group. Bonuses look at the rewards of the
    scorer, not at other terms. What a term compares, characters, is the info `"term/measured"`. Components and
    infos of the scorer become `"scorer/name"`, as in every `CombinedScorer`.

    A group is the rows of the call with one data row (`groups_of`): score whole groups, as a step of an environment
    with `group_size` does. If only a part of a group is stepped, or routed here, this part is the group. The order of
    rows changes nothing. Rows without a score are in no statistic.

    Lengths are characters of the last reply, without white space at the ends. A reply whose answer is empty, or whose
    thinking has not ended, counts as the longest of its group, or to say nothing would pay most. So does one without
    thinking where thinking is compared. For a limit use `kind="length"` (DAPO) or GRPO's `advantage.overlong_buffer`.

    Args:
        scorer: argument of `load_scorer`.
        **options: the fields of `ShapingOptions`.

    Raises:
        ConfigError: an option is unknown or invalid.

    Example:
        >>> scorer = ShapedScorer(lambda conversations: [1.0] * len(conversations), answer_length=0.5)
        >>> scores = scorer.score([[{"role": "assistant", "content": reply}] for reply in ("42", "It is 42.", "")])
        >>> scores.components["answer_length"].round(3).tolist()
        [0.333, -0.167, -0.167]
    """

    def __init__(self, scorer: ScorerLike, **options: Any) -> None:
        self.options = parse_settings(ShapingOptions, options)
        self.thinking = Thinking.parse(self.options.thinking)
        super().__init__({"scorer": scorer})

    @property
    def relative(self) -> bool:
        """Whether a reward depends on the other rows of a call; see `gym_rm.scorer.is_relative`."""
        return True

    @property
    def settings(self) -> dict[str, Any]:
        """Options."""
        return {**self.options.model_dump(), "thinking": self.thinking.setting}

    def _results(self, conversations: Sequence[Conversation], prompts: Prompts) -> dict[str, Scores]:
        results = super()._results(conversations, prompts)
        coefficients = {name: value for name in TERMS if (value := getattr(self.options, name))}
        rewards = results["scorer"].rewards
        scored = np.flatnonzero(np.isfinite(rewards)).tolist() if coefficients else []
        replies, errors = dict[int, Mapping[str, float | None]](), dict[int, str]()
        for row in scored:
            try:
                replies[row] = self._measure(conversations[row])
            except ConversationError as error:
                errors[row] = RowError.of(error)
        groups = groups_of(conversations, prompts, replies)
        for name, coefficient in coefficients.items():
            lengths = {row: reply[TERMS[name]] for row, reply in replies.items()}
            term = np.full(len(rewards), np.nan)
            for rows in groups:
                term[rows] = self._term(name, [lengths[row] for row in rows], rewards[rows].tolist())
            infos = {"measured": np.array([lengths.get(row) for row in scored], dtype=np.float64)}
            scores = Scores.from_rewards(coefficient * term[scored], errors=list(map(errors.get, scored)), infos=infos)
            results[name] = scores.scatter(scored, len(rewards))
        return results

    def _measure(self, conversation: Conversation) -> dict[str, float | None]:
        """Return what the terms compare. Raises ConversationError if there is no reply in text."""
        reply_text(conversation)
        thinking, answer = self.thinking.split(conversation[-1])
        if not answer or not _INVISIBLE.sub("", answer):
            return dict.fromkeys(TERMS.values())
        return {"thinking": len(thinking) or None, "answer": len(answer), "reply": len(thinking) + len(answer)}

    def _term(self, name: str, lengths: Lengths, rewards: Sequence[float]) -> list[float]:
        if name == "length_reward":
            return length_rewards(lengths, [reward >= self.options.right_at_least for reward in rewards])
        if name.endswith("bonus"):
            return shortest_of_the_best(lengths, rewards, self.options.top_share)
        return group_weights(lengths)

    def _reduce(
        self, components: Mapping[str, RewardArray], conversations: Sequence[Conversation], prompts: Prompts
    ) -> tuple[RewardArray, Mapping[str, RewardArray]]:
        return sum((components[name] for name in TERMS if name in components), components["scorer"].copy()), {}


def group_weights(lengths: Lengths) -> list[float]:
    """Return `w - mean(w)` with `w = 1 - (length - min) / (max - min)`; 0 if all lengths are equal.

    Source: genrm_compare of NeMo Gym (`group_answer_length_penalty_coeff`), where an empty text counts as the shortest.
    """
    weights = [1 - place for place in _places(lengths)]
    mean = math.fsum(weights) / len(weights)
    return [weight - mean for weight in weights]


def length_rewards(lengths: Lengths, right: Sequence[bool]) -> list[float]:
    """Return `0.5 - (length - min) / (max - min)`, for a wrong reply at most 0; 0 if all lengths are equal.

    Source: Kimi k1.5, arXiv 2501.12599, section 2.3.3; minimum and maximum are those of all replies to the prompt.
    """
    values = [0.5 - place for place in _places(lengths)]
    return [value if is_right else min(0.0, value) for value, is_right in zip(values, right, strict=True)]


def shortest_of_the_best(lengths: Lengths, rewards: Sequence[float], top_share: float) -> list[float]:
    """Return 1 for the shortest of the best replies, and all as short; 0 for the others, and for a reply alone.

    The best are the `max(1, int(N * top_share))` highest rewards of N (of 16, with 0.2: three) and those that equal the
    last of them. Source: genrm_compare of NeMo Gym, which gives it only if the shortest of all is one of the best.
    """
    threshold = sorted(rewards, reverse=True)[max(1, int(len(rewards) * top_share)) - 1]
    best = [None if reward < threshold else length for length, reward in zip(lengths, rewards, strict=True)]
    shortest = min((length for length in best if length is not None), default=math.nan)
    return [float(length == shortest and len(rewards) > 1) for length in best]


def _places(lengths: Lengths) -> list[float]:
    """Return `(length - min) / (max - min)`, 1 for None; 0.5 for all if all are equal."""
    known = [length for length in lengths if length is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    if low == high and len(known) in (0, len(lengths)):
        return [0.5] * len(lengths)
    return [1.0 if length is None else (length - low) / ((high - low) or 1.0) for length in lengths]
