"""The modes of a judge: which questions a call takes, and the rewards that their verdicts give.

| comparisons of N different replies | questions | pairs |
| --- | --- | --- |
| `all_pairs` | N (N - 1) | every two, with each of them first |
| `circular` | N | each with the next one in the call, so that each is first once and second once |
| `reference` | 2 N | each with the reference reply, with each of them first |

`circular` is the default of NeMo Gym's genrm_compare. Equal replies are judged once, and count once. A judge that
prefers a place gives equal replies equal means only if each was seen in both places, so in a circle a reply needs both
comparisons.
"""

from __future__ import annotations

import abc
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_rm.errors import ConversationError, RowError, warn_once
from gym_rm.generation.chat import seed_of
from gym_rm.plain_values import to_plain
from gym_rm.scorers.groups import groups_of, shared_beginning
from gym_rm.scorers.judge.asking import Answer
from gym_rm.scorers.judge.options import OURS, JudgeOptions
from gym_rm.scorers.judge.plan import Case, JudgeRow, Plan, Verdicts
from gym_rm.scorers.judge.questions import Questions, Shown
from gym_rm.scorers.judge.rubrics import ROW_FIELDS, Criterion, field_of, read_rubric, rubric_of_row, rubric_reward
from gym_rm.scorers.judge.verdicts import NoVerdict
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Message

ORDERS = ((0, 1), (1, 0))
COSTS = ("judge_questions", "judge_answers", "judge_unread", "judge_tokens")
LIST_SIZE = 16  # most different replies in a question
MIN_COMPARISONS = 0.5  # of a reply, that must have a verdict


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of a row among replies that a judge saw together, with the verdicts on them."""

    case: Case
    place: int
    verdicts: Verdicts

    @property
    def values(self) -> NDArray[np.float64]:
        """Values of the row's reply, one for each sample that has its verdicts."""
        return self.verdicts.values[:, self.place]

    @property
    def value(self) -> float:
        """Mean value of the row's reply. Raises NoVerdict if there is none."""
        if self.verdicts.error is not None and not len(self.values):
            raise NoVerdict(self.verdicts.error)
        return float(self.values.mean())


class JudgeMode(abc.ABC):
    """What a question is about, and what verdicts are worth.

    Args:
        questions: writes the questions.
        options: those of the judge.

    Attributes:
        relative: whether a reward depends on the other rows of a call.
        choices: whether verdicts are choices, not scores.
        settings: settings of this mode, for `Provenance`.
    """

    name: str
    relative = False
    choices = False

    def __init__(self, questions: Questions, options: JudgeOptions) -> None:
        self.questions, self.options = questions, options
        self.settings: dict[str, Any] = {}

    def plan(self, rows: Sequence[JudgeRow]) -> Plan:
        """Return the questions of a call."""
        plan = Plan(errors={number: row.error for number, row in enumerate(rows) if row.error is not None})
        self._plan(plan, rows, [number for number in range(len(rows)) if number not in plan.errors])
        return plan

    def tally(self, rows: Sequence[JudgeRow], plan: Plan, answers: Mapping[int, Answer]) -> Scores:
        """Return the scores of all rows from the answers, by the seeds of the questions."""
        seats: list[list[Seat]] = [[] for _ in rows]
        for case in plan.cases:
            verdicts = case.verdicts(answers, choices=self.choices)
            for place, numbers in enumerate(case.rows):
                for row in numbers:
                    seats[row].append(Seat(case, place, verdicts))
        rewards, errors = [math.nan] * len(rows), [plan.errors.get(row) for row in range(len(rows))]
        components: list[Mapping[str, float]] = [{} for _ in rows]
        infos: list[Mapping[str, Any]] = [{} for _ in rows]
        for row in range(len(rows)):
            if errors[row] is None:
                try:
                    rewards[row], components[row] = self._reward(seats[row])
                    infos[row] = self._infos(seats[row], answers)
                except (NoVerdict, ConversationError) as error:
                    errors[row] = RowError.of(error)
        return Scores.from_rewards(
            rewards,
            components=_columns(components),
            errors=errors,
            infos={**_columns(infos), **_costs(seats, answers), **(_leads(seats, answers) if self.relative else {})},
        )

    @abc.abstractmethod
    def _plan(self, plan: Plan, rows: Sequence[JudgeRow], numbers: Sequence[int]) -> None:
        """Add what is asked about these rows to the plan."""

    def _reward(self, seats: Sequence[Seat]) -> tuple[float, Mapping[str, float]]:
        """Return the reward of a row and its components. Raises NoVerdict if it has none."""
        return seats[0].value, {}

    def _add(
        self,
        plan: Plan,
        rows: Sequence[JudgeRow],
        places: Sequence[tuple[int, ...]],
        before: Conversation,
        replies: Sequence[Conversation],
        *,
        orders: Sequence[tuple[int, ...]] | None = ((0,),),
        criterion: Criterion | None = None,
    ) -> None:
        """Add replies that are shown together. Orders are those of every sample; None for a random one of each."""
        prompt = next(rows[row].prompt for numbers in places for row in numbers)
        reference = prompt.answer if prompt is not None and self.options.reference else None
        samples = []
        try:
            for sample in range(self.options.samples):
                seed = seed_of(_text(before), [_text(each) for each in replies], sample)
                asked = []
                for order in orders or [tuple(np.random.default_rng(seed).permutation(len(replies)).tolist())]:
                    placed = tuple(tuple(replies[place]) for place in order)
                    shown = Shown(before, placed, prompt, reference, criterion)
                    asked.append((order, self.questions.question(shown, sample)))
                samples.append(tuple(asked))
        except ConversationError as error:
            plan.fail([row for numbers in places for row in numbers], RowError.of(error))
        else:
            plan.cases.append(Case(tuple(places), tuple(samples), criterion))

    def _infos(self, seats: Sequence[Seat], answers: Mapping[int, Answer]) -> dict[str, Any]:
        """Return what the judge wrote of a row first, and how sure it is."""
        first = answers[seats[0].case.questions[0].seed].text
        spreads = [float(seat.values.std()) for seat in seats if len(seat.values)]
        infos = {"judgement": first, "disagreement": _mean(spreads)}
        if self.questions.decides:
            said = [answers[question.seed] for seat in seats for question in seat.case.questions]
            infos |= {f"verdict_{name}": _mean([getattr(each, name) for each in said]) for name in ("mass", "unknown")}
        return infos


class ScoreMode(JudgeMode):
    """A question about each reply."""

    name = "score"

    def _plan(self, plan: Plan, rows: Sequence[JudgeRow], numbers: Sequence[int]) -> None:
        for row in numbers:
            *before, reply = rows[row].conversation
            self._add(plan, rows, [(row,)], before, [[reply]])


class RubricMode(JudgeMode):
    """A question about each criterion of a reply."""

    name = "rubric"

    def __init__(self, questions: Questions, options: JudgeOptions) -> None:
        super().__init__(questions, options)
        self._criteria = () if options.rubric is None else read_rubric(options.rubric)
        self.settings = {"rubric": [each.model_dump(mode="json") for each in self._criteria] or "of each row"}

    def _plan(self, plan: Plan, rows: Sequence[JudgeRow], numbers: Sequence[int]) -> None:
        for row in numbers:
            *before, reply = rows[row].conversation
            has_own = any(field_of(rows[row].prompt, name) is not None for name in ROW_FIELDS)
            try:
                criteria = rubric_of_row(rows[row].prompt) if has_own or not self._criteria else self._criteria
            except ConversationError as error:
                plan.fail([row], RowError.of(error))
                continue
            for criterion in criteria:
                self._add(plan, rows, [(row,)], before, [[reply]], criterion=criterion)

    def _reward(self, seats: Sequence[Seat]) -> tuple[float, Mapping[str, float]]:
        weights, values, components = list[float](), list[float](), dict[str, float]()
        for seat in seats:
            assert seat.case.criterion is not None
            weights.append(seat.case.criterion.weight)
            values.append(seat.value)
            # Faults are negative, so that more of a component is better for every estimator of advantages.
            components[seat.case.criterion.component] = 0.0 - values[-1] if weights[-1] < 0 else values[-1]
        return rubric_reward(weights, values), components


class ListwiseMode(JudgeMode):
    """A question about all replies of a group."""

    name = "listwise"
    relative = True

    def _plan(self, plan: Plan, rows: Sequence[JudgeRow], numbers: Sequence[int]) -> None:
        for before, different in _groups(rows, numbers):
            different.sort(key=lambda each: _text(each[1]))  # the order of the rows changes nothing
            if len(different) > LIST_SIZE:
                reason = RowError(f"the group has {len(different)} different replies, a list at most {LIST_SIZE}")
                plan.fail([row for same, _ in different for row in same], reason)
            else:
                same, replies = zip(*different, strict=True)
                self._add(plan, rows, same, before, replies, orders=None)


class PairwiseMode(JudgeMode):
    """Questions about two replies."""

    name = "pairwise"

    def __init__(self, questions: Questions, options: JudgeOptions) -> None:
        super().__init__(questions, options)
        self.choices = questions.mode.is_choice and not questions.decides
        self.comparisons = options.comparisons or ("reference" if options.style == OURS else "all_pairs")
        self.relative = self.comparisons != "reference"
        self._orders = ORDERS[:1] if self.comparisons == "circular" else ORDERS
        self.settings = {"comparisons": self.comparisons}

    def _plan(self, plan: Plan, rows: Sequence[JudgeRow], numbers: Sequence[int]) -> None:
        if self.comparisons == "reference":
            for row in numbers:
                self._with_reference(plan, rows, row)
        else:
            for before, different in _groups(rows, numbers):
                self._with_each_other(plan, rows, before, different)

    def _with_reference(self, plan: Plan, rows: Sequence[JudgeRow], row: int) -> None:
        *before, reply = rows[row].conversation
        text = field_of(rows[row].prompt, "reference_reply")
        if isinstance(text, str) and self.options.judged == "answer":
            text = self.options.thinking.split({"content": text})[1]
        if not isinstance(text, str) or not text.strip():
            reason = "there is no text in prompt.metadata['reference_reply'] to compare the reply with"
            plan.fail([row], RowError(reason, "invalid"))
        else:
            replies = [[reply], [Message(role="assistant", content=text)]]
            self._add(plan, rows, [(row,), ()], before, replies, orders=self._orders)

    def _with_each_other(
        self, plan: Plan, rows: Sequence[JudgeRow], before: Conversation, different: Sequence[_Same]
    ) -> None:
        if sum(len(same) for same, _ in different) == 1 and self.options.unfinished is None:
            reason = RowError("there is no other reply to the same prompt in this call to compare with")
            plan.fail(different[0][0], reason)
            return
        size, pairs = len(different), list(itertools.combinations(range(len(different)), 2))
        if self.comparisons == "circular" or size == 1:  # one reply, perhaps of several rows, is compared with itself
            pairs = [(number, (number + 1) % size) for number in range(size)]
        for one, other in pairs:
            places = [different[one][0], different[other][0]]
            replies = [different[one][1], different[other][1]]
            orders = self._orders if one != other else ORDERS[:1]
            self._add(plan, rows, places, before, replies, orders=orders)

    def _reward(self, seats: Sequence[Seat]) -> tuple[float, Mapping[str, float]]:
        values = [seat.value for seat in seats if len(seat.values)]
        # In a circle, a reply is seen once in each place, and needs both.
        needed = 1.0 if self.comparisons == "circular" else MIN_COMPARISONS
        if not values or len(values) < needed * len(seats):
            error = next(seat.verdicts.error for seat in seats if seat.verdicts.error)
            counts = f"{len(values)} of {len(seats)} comparisons have a verdict"
            raise NoVerdict(RowError(f"{counts}, but {needed:.0%} of them are needed: {error}", error.kind))
        if len(values) < len(seats):
            warn_once(
                "some comparisons of a judge have no verdict and are left out of the means; infos['judge_unread'] "
                "counts them."
            )
        return math.fsum(values) / len(values), {}

    def _infos(self, seats: Sequence[Seat], answers: Mapping[int, Answer]) -> dict[str, Any]:
        kept = [seat.verdicts.consistent for seat in seats if math.isfinite(seat.verdicts.consistent)]
        verdicts = [answers[question.seed].values for seat in seats for question in seat.case.questions]
        first = [said[0] > said[1] for said in verdicts if said is not None and said[0] != said[1]]
        infos = super()._infos(seats, answers)
        return {**infos, "position_consistent": _mean(kept), "prefers_first": _mean(first)}


MODES: Mapping[str, type[JudgeMode]] = {mode.name: mode for mode in (ScoreMode, PairwiseMode, ListwiseMode, RubricMode)}

_Same = tuple[tuple[int, ...], Conversation]
"""The rows that have a reply, and the reply."""


def _groups(rows: Sequence[JudgeRow], numbers: Sequence[int]) -> Iterator[tuple[Conversation, list[_Same]]]:
    """Yield, for each group, the messages that its conversations share and its different replies."""
    conversations = [row.conversation for row in rows]
    for group in groups_of(conversations, [row.prompt for row in rows], numbers):
        before = shared_beginning([conversations[row] for row in group], rows[group[0]].prompt)
        different: dict[str, list[int]] = {}
        for row in group:
            different.setdefault(_text(conversations[row][len(before) :]), []).append(row)
        yield before, [(tuple(same), conversations[same[0]][len(before) :]) for same in different.values()]


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return values by name, of all rows; NaN, or None for texts, where a row has none."""
    names = dict.fromkeys(name for each in rows for name in each)
    return {name: [each.get(name, None if name == "judgement" else math.nan) for each in rows] for name in names}


def _costs(seats: Sequence[Sequence[Seat]], answers: Mapping[int, Answer]) -> dict[str, list[float]]:
    """Return what each row cost; a question about n rows counts 1 / n for each."""
    costs = {name: [0.0 if each else math.nan for each in seats] for name in COSTS}
    about: dict[int, set[int]] = {}
    for row, each in enumerate(seats):
        for seat in each:
            for question in seat.case.questions:
                about.setdefault(question.seed, set()).add(row)
    for seed, rows in about.items():
        answer = answers[seed]
        tokens = math.nan if answer.tokens is None else float(answer.tokens)
        for name, value in zip(COSTS, (1.0, answer.attempts, answer.values is None, tokens), strict=True):
            for row in rows:
                costs[name][row] += value / len(rows)
    return costs


def _leads(seats: Sequence[Sequence[Seat]], answers: Mapping[int, Answer]) -> dict[str, list[float]]:
    """Return the verdicts for each row's reply less those against it, beside one other row; NaN without any."""
    leads = []
    for each in seats:
        pairs = [seat for seat in each if len(seat.case.rows) == 2]
        found = [(seat.place, *asked) for seat in pairs for sample in seat.case.samples for asked in sample]
        said = [(order.index(place), answers[question.seed].values) for place, order, question in found]
        won = [np.sign(values[shown] - values[1 - shown]) for shown, values in said if values is not None]
        leads.append(float(sum(won)) if pairs else math.nan)
    return {"judge_lead": leads}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _text(messages: Conversation) -> str:
    return json.dumps(to_plain([dict(message) for message in messages]), sort_keys=True)
