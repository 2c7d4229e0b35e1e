"""Rewards for a judge that is trained: how near the verdict of a judgement is to the label of its data row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import regex

from gym_rm.checks import finite, one_of
from gym_rm.engine.text.judged import Judged
from gym_rm.errors import ConfigError, RowError
from gym_rm.generation.chat import ChatReply
from gym_rm.scorers.judge.forms import Scale, last_object, read_verdict, tiebroken
from gym_rm.scorers.judge.options import OURS
from gym_rm.scorers.judge.rubrics import field_of
from gym_rm.scorers.judge.styles import load_style
from gym_rm.scorers.judge.verdicts import MOST_FAILURES, NoVerdict, number_on, object_at
from gym_rm.scorers.reply_scorer import Grade, ReplyScorer
from gym_rm.types import Prompt

NVIDIA = "generative_reward_model"
UNREADABLE = {"preference": 0.0, "distance": -100.0, NVIDIA: -100.0}
WEIGHTS, RUBRICS_WEIGHT = {"score_1": 1.0, "score_2": 1.0, "ranking": 2.0}, 0.5
LABEL = ("preferred", "ground_truth_overall", "ground_truth_rubric_scores", "judge_mark")
READ = (-1e6, 1e6)  # numbers beyond are no scores: one reply would outweigh all others, or overflow
MALFORMED = (AttributeError, KeyError, TypeError, ValueError, OverflowError)
Parts: TypeAlias = dict[int | None, dict[str, float]]  # numbers by name, overall (None) and of each rubric by its id
_OBJECT = regex.compile(r"\{\s*+[\"}]")  # the beginning of a JSON object
_WRONG_ESCAPE = regex.compile(r'(?<!\\)((?:\\\\)*+)\\(?!["\\/bfnrtu])')  # of LaTeX in JSON


class VerdictScorer(ReplyScorer):
    """Scores judgements of two replies by the labels of their data rows, which `gym-rm data judgements` writes.

    A label is `preferred` (1 or 2, the place of the better reply) or `ground_truth_overall` (any of `score_1`,
    `score_2`, and `ranking` from 1, the first reply is much better, to 6), and `ground_truth_rubric_scores`, a list of
    the same with a `rubric_id`. Without what the formula needs, the row has an error. The info `verdict` is `right`,
    `wrong`, `tie` or `unreadable`, None for an error or a label that prefers no reply.

    Args:
        style: the judge's style, a name or file, whose parser reads the verdict, as in `JudgeScorer`; None for ours.
        formula: `"preference"`: 1.0 if the verdict prefers the better reply, else 0.0. `"distance"`: minus
            `|s1 - t1| + |s2 - t2| + 2 |r - t|` of the fields that the label has, on the style's scale.
            `"generative_reward_model"`: the same, minus half of its mean over the rubrics of the label, from answers
            with exactly one JSON object that has each of these rubrics once, and no number beyond 1e6; without a style
            (README of resources_servers/generative_reward_model in NeMo Gym; its code leaves equal rubrics out).
        unreadable: reward of a reply without a verdict; `"error"` for an error of the row; None for 0 with
            `"preference"`, else -100.
        judged, thinking: fields of `JudgedOptions`. A reply whose thinking has not ended has no verdict.

    Raises:
        ConfigError: an option is invalid, or the style has no such verdict on two replies.

    Example:
        >>> prompt = Prompt(({"role": "user", "content": "A or B?"},), "p", metadata={"preferred": 1})
        >>> reply = {"role": "assistant", "content": "It is right. [[A]]"}
        >>> VerdictScorer("skywork-critic").score([[*prompt.messages, reply]], [prompt]).rewards.tolist()
        [1.0]
    """

    model = "verdict"

    def __init__(
        self,
        style: str | None = None,
        *,
        formula: Literal["preference", "distance", "generative_reward_model"] = "preference",
        unreadable: float | Literal["error"] | None = None,
        judged: Judged = "answer",
        thinking: Any = None,
    ) -> None:
        super().__init__(judged=judged, thinking=thinking)
        self.formula: str = one_of("formula", formula, [*UNREADABLE])
        outcome = UNREADABLE[formula] if unreadable is None else unreadable
        self.unreadable = None if outcome == "error" else finite("unreadable", outcome)
        self.style = style or (None if formula == NVIDIA else OURS)
        self._mode = mode = None if self.style is None else load_style(self.style).modes.get("pairwise")
        scores = mode is None or mode.verdict.form in ("json_pair", "json_scores")
        if (mode is None) != (formula == NVIDIA) or (formula == "distance" and not scores):
            raise ConfigError(
                f"style={style!r} has no verdict for formula={formula!r}: 'preference' needs a style that compares two "
                f"replies, 'distance' one that writes their scores as JSON, and {NVIDIA!r} none."
            )

    def grades(self, replies: Sequence[tuple[str, Prompt | None]]) -> Sequence[Grade]:
        """Return how near the verdicts of replies are to the labels of their rows."""
        return [self._grade(*each) for each in replies]

    def unread(self, error: RowError) -> Grade:
        """Return the grade of a row without a score."""
        return Grade(error=error, infos={"verdict": None})

    def _grade(self, reply: str, prompt: Prompt | None) -> Grade:
        preferred, overall, rubrics, mark = given = [field_of(prompt, name) for name in LABEL]
        mode, by_preference = self._mode, self.formula == "preference"
        try:
            scale = READ if mode is None or by_preference else mode.scale
            label = numbers_of(overall or {}, (rubrics or ()) if mode is None else (), scale)
            better = ahead(label[None]) if preferred is None else {1: 1.0, 2: -1.0}[preferred]
            if not (better if by_preference else any(label.values())):
                raise ValueError(f"formula={self.formula!r} needs {'preferred or ' * by_preference}{LABEL[1]}")
        except (*MALFORMED, NoVerdict) as error:
            shown = dict(zip(LABEL, given, strict=True))
            return self.unread(RowError(f"the label of the row, {shown!r:.200}, is not enough: {error!r}", "invalid"))
        try:
            if mode is None:
                told = read_rubrics(reply)
            else:
                answer = ChatReply(reply, finished=True)
                values = read_verdict(answer, mode.verdict, size=2, scale=mode.scale, mark=str(mark or ""))
                is_pair = mode.verdict.form == "json_pair"  # whose values have ties broken by the ranking
                fields = last_object(reply, [*WEIGHTS]) if is_pair else dict(zip(WEIGHTS, values, strict=False))
                told = numbers_of(fields, ())
            reward = 0.0 if by_preference else 0.0 - distance(told, label)
        except NoVerdict as error:
            if self.unreadable is None:
                return self.unread(RowError(f"the reply has no verdict: {error}"))
            return Grade(self.unreadable, infos={"verdict": "unreadable"})
        lead = math.copysign(1.0, better) * ahead(told[None])
        verdict = None if not better else "right" if lead > 0 else "wrong" if lead else "tie"
        return Grade(float(verdict == "right") if by_preference else reward, infos={"verdict": verdict})


def numbers_of(overall: Any, rubrics: Any, scale: Scale = READ) -> Parts:
    """Return the numbers that are there, overall and of each rubric. Raises NoVerdict or one of `MALFORMED`."""
    given = [(None, overall), *((int(each["rubric_id"]), each) for each in rubrics)]
    if len(dict(given)) < len(given):
        raise ValueError("a rubric is there twice")
    known = [(part, [name for name in WEIGHTS if each.get(name) is not None], each) for part, each in given]
    scales = dict.fromkeys(WEIGHTS, scale) | {"ranking": READ}
    return {part: {name: number_on(scales[name], each[name]) for name in names} for part, names, each in known}


def ahead(fields: Mapping[str, float]) -> float:
    """Return how far the first reply is ahead, by the scores or else by the ranking; 0 if neither says it."""
    both = fields.keys() >= {"score_1", "score_2"}
    first, second = tiebroken(both and fields["score_1"], both and fields["score_2"], fields.get("ranking"))
    return first - second


def distance(told: Parts, label: Parts) -> float:
    """Return the weighted differences from the label. Raises NoVerdict for other rubrics, or a missing number."""
    if len(label) > 1 and told.keys() != label.keys():
        raise NoVerdict(f"expected the rubrics {[*label][1:]}, got {[*told][1:]}")
    if missing := [name for part, known in label.items() for name in known if name not in told[part]]:
        raise NoVerdict(f"the verdict has no {missing}")
    share = RUBRICS_WEIGHT / max(1, sum(bool(known) for part, known in label.items() if part is not None))
    off = [
        (part, WEIGHTS[name] * abs(told[part][name] - known[name])) for part, known in label.items() for name in known
    ]
    return math.fsum(each if part is None else share * each for part, each in off)


def read_rubrics(text: str) -> Parts:
    """Return the numbers of the only JSON object in a text. Raises NoVerdict if there is another one, or one lacks."""
    text, found, failures, end = _WRONG_ESCAPE.sub(r"\1\\\\", text), list[Mapping[str, Any]](), 0, 0
    while failures < MOST_FAILURES and (opened := _OBJECT.search(text, end)):
        try:
            each, end = object_at(text, opened.start())
            found.append(each)
        except NoVerdict:
            failures, end = failures + 1, opened.start() + 1
    try:
        (only,) = found * (failures < MOST_FAILURES)  # none in a text that is not read to its end
        told = numbers_of(only["overall"], only["rubric_evaluations"])
    except MALFORMED as error:
        raise NoVerdict(f"expected one JSON object with overall and rubric_evaluations: {error!r:.80}") from error
    if len(told) == 1 or any(len(numbers) < len(WEIGHTS) for numbers in told.values()):
        raise NoVerdict(f"there is no rubric, or one of {[*WEIGHTS]} is missing")
    return told
