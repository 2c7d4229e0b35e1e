"""One call of a judge: which questions it takes, and the scores from their verdicts."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gym_rm.engine.text.messages import check_conversation
from gym_rm.errors import ConversationError, warn_once
from gym_rm.generation.chat import seed_of
from gym_rm.plain_values import to_plain
from gym_rm.scorers.groups import groups_of, shared_beginning
from gym_rm.scorers.judge.asking import Ask, Questions
from gym_rm.scorers.judge.comparisons import (
    BOTH_ORDERS,
    IN_ORDER,
    Case,
    Comparisons,
    Order,
    judged,
    pairs_of,
    rows_by_ask,
)
from gym_rm.scorers.judge.options import JudgeOptions
from gym_rm.scorers.judge.prompts import Mode, Shown
from gym_rm.scorers.judge.rubrics import ROW_FIELDS, Criterion, field_of, rubric_of_row, rubric_reward
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Message, Prompt

TIE = 0.5
NO_REFERENCE = "there is no text in prompt.metadata['reference_reply'] to compare the reply with"
COSTS = ("judge_questions", "judge_answers", "judge_unread", "judge_tokens")


@dataclass(frozen=True)
class Judging:
    """How a judge judges.

    Attributes:
        options: its options.
        questions: how it is asked, and how its answers are read.
        mode: what a question is about.
        comparisons: which replies are compared.
        orders: the orders in which two replies are shown.
        choices: whether a comparison has a choice (1, 0.5 or 0) as its verdict, not two scores.
        criteria: criteria for all rows; None for those of each row.
    """

    options: JudgeOptions
    questions: Questions
    mode: Mode
    comparisons: Comparisons
    orders: tuple[Order, ...]
    choices: bool
    criteria: tuple[Criterion, ...] | None

    @property
    def min_comparisons(self) -> float:
        """Smallest share of a reply's comparisons that must have a verdict, so that it was seen in both places."""
        seen_once_in_a_place = self.comparisons == "circular" and len(self.orders) == 1
        return 1.0 if seen_once_in_a_place else self.options.min_comparisons


@dataclass(slots=True)
class _Row:
    """What is known of a row.

    Attributes:
        conversation: its messages, as they are judged; None if there is nothing to judge.
        reward: its reward, once it is known.
        error: why it has none.
        cases: the cases that it is part of, with its place in each.
        components: values of the criteria.
    """

    conversation: Conversation | None = None
    reward: float = math.nan
    error: str | None = None
    cases: list[tuple[Case, int]] = field(default_factory=list)
    components: dict[str, float] = field(default_factory=dict)


class JudgeCall:
    """The questions of a call, and its scores after they were asked.

    Args:
        judging: how the judge judges.
        conversations: N conversations that end with a reply.
        prompts: the data row of each, or None.

    Attributes:
        asks: the questions, each once.
    """

    def __init__(
        self, judging: Judging, conversations: Sequence[Conversation], prompts: Sequence[Prompt | None]
    ) -> None:
        self._judging, self._prompts = judging, prompts
        self._rows = [self._row(*each) for each in zip(conversations, prompts, strict=True)]
        self._by_seed: dict[int, Ask] = {}
        self._ties: dict[int, float] = {}
        match judging.mode:
            case "pairwise" if judging.comparisons == "reference":
                for row in self._judged_rows():
                    self._with_reference(row)
            case "pairwise" | "listwise":
                known = [each.conversation or () for each in self._rows]
                for group in groups_of(known, prompts, self._judged_rows()):
                    self._group(group)
            case "rubric":
                for row in self._judged_rows():
                    self._rubric(row)
            case _:
                for row in self._judged_rows():
                    conversation = self._conversation(row)
                    self._case([(row,)], conversation[:-1], [conversation[-1:]], orders=[(0,)])

    @property
    def asks(self) -> list[Ask]:
        """The questions, each once."""
        return list(self._by_seed.values())

    def scores(self) -> Scores:
        """Return the scores of all rows."""
        judging = self._judging
        for number in self._judged_rows():
            row = self._rows[number]
            match judging.mode:
                case "pairwise":
                    self._reward_comparisons(number)
                case "listwise":
                    (case, place), *_ = row.cases
                    found = judged(case, choices=False)
                    row.reward = math.nan if found is None else float(found[0][:, place].mean())
                    row.error = case.error if found is None else None
                case _:
                    row.error = next((error for case, _ in row.cases if (error := case.error) is not None), None)
                    if row.error is None and judging.mode == "rubric":
                        self._reward_rubric(number)
                    elif row.error is None:
                        row.reward = float(np.mean([ask.values or () for case, _ in row.cases for ask in case.asks]))
        names = {name: None for row in self._rows for name in row.components}
        return Scores.from_rewards(
            [row.reward for row in self._rows],
            components={name: [row.components.get(name, math.nan) for row in self._rows] for name in names},
            errors=[row.error for row in self._rows],
            infos=self._infos(),
        )

    # --- questions -----------------------------------------------------------------------------------------------

    def _row(self, given: Conversation, prompt: Prompt | None) -> _Row:
        chosen = {"mode", "style", "rubric", "comparisons"} & self._judging.options.model_fields_set
        try:
            if not chosen and isinstance(field_of(prompt, "rubric"), list):
                raise ConversationError("the row has a list `rubric`; judge it with mode='rubric', or pass rubric=")
            conversation = check_conversation(given)
            if (role := conversation[-1]["role"]) != "assistant":
                raise ConversationError(
                    f"the last message must be a reply, with the role 'assistant'; got {role!r:.100}."
                )
            return _Row(conversation)
        except ConversationError as error:
            return _Row(error=str(error))

    def _judged_rows(self) -> list[int]:
        """Return the rows that have something to judge, and no error so far."""
        return [number for number, row in enumerate(self._rows) if row.conversation is not None and row.error is None]

    def _conversation(self, row: int) -> Conversation:
        conversation = self._rows[row].conversation
        assert conversation is not None
        return conversation

    def _case(
        self,
        rows: Sequence[tuple[int, ...]],
        before: Conversation,
        replies: Sequence[Conversation],
        *,
        orders: Sequence[Order] | None = None,
        criterion: Criterion | None = None,
    ) -> Case | None:
        """Add a case with its questions. Orders are those of every sample; None for a random one of each sample."""
        options = self._judging.options
        prompt = next((self._prompts[row] for each in rows for row in each), None)
        reference = prompt.answer if prompt is not None and options.reference else None
        shown = Shown(before, tuple(tuple(each) for each in replies), prompt, reference, criterion)
        case = Case(shown, tuple(rows))
        try:
            for sample in range(options.samples):
                seed = seed_of(_text(before), [_text(each) for each in replies], sample)
                placed = orders or [tuple(np.random.default_rng(seed).permutation(len(replies)).tolist())]
                case.samples.append([(order, self._ask(shown, order, sample)) for order in placed])
        except ConversationError as error:
            for row in {row for each in rows for row in each}:
                self._rows[row].error = self._rows[row].error or str(error)
            return None
        for place, each in enumerate(case.rows):
            for row in each:
                self._rows[row].cases.append((case, place))
        return case

    def _ask(self, shown: Shown, order: Order, sample: int) -> Ask:
        """Return a question; one that was asked already is the same object."""
        placed = dataclasses.replace(shown, replies=tuple(shown.replies[place] for place in order))
        question = self._judging.questions.question(placed)
        seed = seed_of(question.messages, sample)
        return self._by_seed.setdefault(seed, Ask(question, seed))

    def _with_reference(self, row: int) -> None:
        """Compare a reply with the reference reply of its data row."""
        judging, (*before, reply) = self._judging, self._conversation(row)
        text = field_of(self._prompts[row], "reference_reply")
        if isinstance(text, str) and judging.options.judged == "answer":
            text = judging.options.thinking.split({"content": text})[1]
        if not isinstance(text, str) or not text.strip():
            self._rows[row].error = NO_REFERENCE
        elif judging.choices and dict(reply) == {"role": "assistant", "content": text}:
            self._ties[row] = 1.0
        else:
            replies = [[reply], [Message(role="assistant", content=text)]]
            self._case([(row,), ()], before, replies, orders=judging.orders)

    def _group(self, group: list[int]) -> None:
        """Compare the replies of a group, or grade them in one question."""
        judging, first = self._judging, group[0]
        before = shared_beginning([self._conversation(row) for row in group], self._prompts[first])
        different: dict[str, list[int]] = {}
        for row in group:
            different.setdefault(_text(self._conversation(row)[len(before) :]), []).append(row)
        if judging.mode == "listwise":  # the order of the rows changes nothing
            different = dict(sorted(different.items()))
        texts, rows = list(different), [tuple(each) for each in different.values()]
        replies = [self._conversation(each[0])[len(before) :] for each in rows]
        if judging.mode == "listwise":
            if len(rows) > (most := judging.options.list_size):
                for row in group:
                    self._rows[row].error = f"the group has {len(rows)} different replies, more than list_size={most}"
            else:
                self._case(rows, before, replies)
        elif len(group) == 1 and judging.options.unfinished is None:
            self._rows[first].error = "there is no other reply to the same prompt in this call to compare with"
        else:
            pairs = pairs_of(judging.comparisons, len(texts))
            if len(rows) == 1 and not judging.choices:  # only the judge can say what two equal replies are worth
                pairs = [(0, 0)]
            elif judging.comparisons == "all_pairs" or len(rows) == 1:
                self._ties |= {row: len(each) - 1.0 for each in rows for row in each if judging.choices}
            orders = judging.orders
            if judging.comparisons == "circular" and len(rows) == 2:  # the same two questions as both orders of a pair
                pairs, orders = [(0, 1)], BOTH_ORDERS
            for one, other in pairs:
                if judging.comparisons != "circular" and seed_of(sorted([texts[one], texts[other]])) % 2:
                    one, other = other, one  # who is first in a single order must not depend on the order of the rows
                placed = orders if one != other else IN_ORDER
                self._case([rows[one], rows[other]], before, [replies[one], replies[other]], orders=placed)

    def _rubric(self, row: int) -> None:
        judging, conversation = self._judging, self._conversation(row)
        try:
            prompt = self._prompts[row]
            has_own = any(field_of(prompt, name) is not None for name in ROW_FIELDS)
            criteria = rubric_of_row(prompt) if has_own or judging.criteria is None else judging.criteria
        except ConversationError as error:
            self._rows[row].error = str(error)
            return
        for each in criteria:
            self._case([(row,)], conversation[:-1], [conversation[-1:]], orders=[(0,)], criterion=each)

    # --- scores --------------------------------------------------------------------------------------------------

    def _reward_comparisons(self, number: int) -> None:
        row, judging = self._rows[number], self._judging
        values, given = [TIE], [self._ties.get(number, 0.0)]
        for case, place in row.cases:
            found = judged(case, choices=judging.choices)
            values.append(math.nan if found is None else float(found[0][:, place].mean()))
            others = case.rows[1 - place]
            given.append(float(len(others)) if judging.comparisons == "all_pairs" and others else 1.0)
        weights = np.where(np.isnan(values), 0.0, given)
        left, total, needed = float(weights.sum()), sum(given), judging.min_comparisons
        if not left or left < needed * total:
            reason = next((case.error for case, _ in row.cases if case.error), "it was not compared with any reply")
            counts = f"{left:g} of {total:g} comparisons have a verdict"
            row.error = f"{counts}, but {needed:.0%} of them are needed: {reason}"
            return
        row.reward = float(np.nan_to_num(values) @ weights / left)
        if left < total:
            warn_once(
                "some comparisons of a judge have no verdict and are left out of the means; infos['judge_unread'] "
                "counts them, and min_comparisons= says how many a reply needs."
            )

    def _reward_rubric(self, number: int) -> None:
        row, weights, values = self._rows[number], list[float](), list[float]()
        for case, _ in row.cases:
            criterion = case.shown.criterion
            assert criterion is not None
            weights.append(criterion.weight)
            values.append(float(np.mean([ask.values or () for ask in case.asks])))
            # Faults are negative, so that more of a component is better for every estimator of advantages.
            row.components[criterion.component] = 0.0 - values[-1] if criterion.weight < 0 else values[-1]
        try:
            row.reward = rubric_reward(weights, values)
        except ConversationError as error:
            row.error = str(error)

    def _infos(self) -> Mapping[str, Sequence[Any]]:
        """Return what the judge wrote, how sure it is, and what it cost, of all rows."""
        judging, size = self._judging, len(self._rows)
        names = ["disagreement", *COSTS]
        names += ["position_consistent", "prefers_first"] if judging.mode == "pairwise" else []
        numbers = {name: [math.nan] * size for name in names}
        for name in COSTS:
            numbers[name] = [0.0 if row.cases else math.nan for row in self._rows]
        for ask, rows in rows_by_ask([case for row in self._rows for case, _ in row.cases]).values():
            unread, tokens = float(ask.values is None), math.nan if ask.tokens is None else float(ask.tokens)
            for name, value in zip(COSTS, (1.0, float(ask.answers), unread, tokens), strict=True):
                for one in rows:
                    numbers[name][one] += value / len(rows)
        texts: list[str | None] = [None] * size
        for number, row in enumerate(self._rows):
            if row.reward == row.reward and row.conversation is not None:
                texts[number] = row.cases[0][0].asks[0].text if row.cases else ""
                spreads, consistent = [0.0] * bool(self._ties.get(number)), [1.0] * bool(self._ties.get(number))
                for case, place in row.cases:
                    if (found := judged(case, choices=judging.choices)) is not None:
                        values, same = found
                        spreads.append(float(values[:, place].std()))
                        consistent += [same] if math.isfinite(same) else []
                numbers["disagreement"][number] = float(np.mean(spreads))
                if judging.mode == "pairwise":
                    numbers["position_consistent"][number] = float(np.mean(consistent)) if consistent else math.nan
            if judging.mode == "pairwise":
                verdicts = [ask.values for case, _ in row.cases for ask in case.asks if ask.values is not None]
                decided = [first > second for first, second in verdicts if first != second]
                numbers["prefers_first"][number] = float(np.mean(decided)) if decided else math.nan
        return {"judgement": texts, **numbers}


def _text(messages: Conversation) -> str:
    return json.dumps(to_plain([dict(message) for message in messages]), sort_keys=True)
