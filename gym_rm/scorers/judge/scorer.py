"""A chat model as the judge of replies: a score for each, or a comparison of two."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pydantic
from numpy.typing import NDArray

from gym_rm.config import Config, Finite, Flag, NonNegativeInt, PositiveInt
from gym_rm.engine.text.messages import check_conversation
from gym_rm.errors import ConfigError, ConversationError
from gym_rm.generation.chat import ChatReply, check_replies, open_chat_model_of, seed_of
from gym_rm.scorer import NeverCopied, check_rows
from gym_rm.scorers.judge.prompts import Question, Rubric
from gym_rm.scorers.judge.verdicts import NoVerdict, read_choice, read_score
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Message, Prompt, Prompts, Provenance

OUTCOMES = {"A": 1.0, "tie": 0.5, "B": 0.0}
AGAIN = "Your answer had no verdict that can be read. Leave out your reasons. "
UNASKED = "it was not asked"


class JudgeOptions(Config):
    """Options of `kind="judge"`, besides those of the chat model."""

    rubric: str | None = None
    """What a good reply is. A text with fields is the whole question:
    `{conversation}`, `{reply}` (or `{reply_a}` and `{reply_b}`), `{reference}`, `{metadata.NAME}` (of the data row),
    `{verdict}` (the form of the verdict), `{low}`, `{high}`. None for criteria that fit any task."""
    mode: Literal["score", "pairwise"] = "score"
    """`score` grades each reply, `pairwise` compares it with others."""
    scale: tuple[Finite, Finite] = (1.0, 10.0)
    """Lowest and highest score."""
    against: Literal["reference", "group"] = "reference"
    """What `pairwise` compares with: `reference` is the text in `prompt.metadata["reference_reply"]`; `group` is every
    other reply to the same prompt in the call (N replies take N (N - 1) answers of the judge)."""
    reference: Flag = True
    """Whether the judge sees `prompt.answer`, where a row has one, as the reference answer."""
    samples: PositiveInt = 1
    """Number of verdicts per question; the reward is their mean. More than 1 needs a temperature."""
    marked: Flag = True
    """Whether the judge must write the mark of the question beside its verdict. Judges trained on a form of their own
    (`[[7]]`) need false; a verdict that they copy from a reply can then pass for theirs."""
    timeout: Finite = pydantic.Field(default=300.0, gt=0)
    """Seconds for a call of `score`; rows without a verdict by then are errors."""
    max_retries: NonNegativeInt = 3
    """How often an answer without a clear verdict is asked for again, and a failed request to a server sent again."""

    @pydantic.model_validator(mode="after")
    def _require_consistent(self) -> JudgeOptions:
        if self.scale[0] >= self.scale[1]:
            raise ValueError(f"scale must be (lowest, highest), got {self.scale}")
        if self.mode == "score" and self.against == "group":
            raise ValueError("against='group' is for mode='pairwise'")
        return self


@dataclass(slots=True)
class _Ask:
    """A question to the judge, and what came of it."""

    question: Question
    seed: int
    verdict: Any = None
    error: str | None = None
    text: str = ""
    reason: str = UNASKED
    answers: int = 0


@dataclass(slots=True)
class _Case:
    """A comparison of two replies, or the grading of one.

    Attributes:
        rows: the row that is graded, or the two that are compared; None for a reference.
        asks: the questions; of a comparison, the samples with the first reply as A and B in turn. Two equal replies
            are a tie without a question.
    """

    rows: tuple[int | None, ...]
    asks: list[_Ask] = field(default_factory=list)

    @property
    def error(self) -> str | None:
        return next((ask.error for ask in self.asks if ask.error is not None), None)


class JudgeScorer(NeverCopied):
    """Scores replies by the verdicts of a chat model.

    What is judged is data: it is fenced by lines with a mark that no judged text contains, and the judge must write
    this mark beside its verdict. An answer without one clear verdict is asked for again, and is an error in the end,
    never a number. Equal rows of a call get one verdict.

    Infos: `judgement` (what the judge wrote first) and `disagreement` (standard deviation of the samples); with
    `mode="pairwise"` also `position_consistent`, the share of comparisons whose verdict did not change when the two
    replies changed places. The others are ties.

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
            model, options, JudgeOptions, owner="kind='judge'", defaults={}
        )
        chosen = self.options
        self._rubric = Rubric(chosen.rubric, mode=chosen.mode, scale=chosen.scale, marked=chosen.marked)
        if self._owned and chosen.samples > 1 and not self.model.options.temperature:  # type: ignore[attr-defined]
            raise ConfigError(f"samples={chosen.samples} would all be equal; pass temperature= above 0.")

    def __repr__(self) -> str:
        return f"JudgeScorer({self.model!r}, mode={self.options.mode!r})"

    @property
    def provenance(self) -> Provenance:
        """The judge's model, and what it is asked."""
        made = getattr(self.model, "provenance", None) or Provenance("", type(self.model).__name__)
        options = self.options
        own: dict[str, Any] = {"mode": options.mode, "rubric": self._rubric.digest, "scale": list(options.scale)}
        own |= {name: getattr(options, name) for name in ("reference", "samples", "marked")}
        own |= {"against": options.against} if options.mode == "pairwise" else {}
        return dataclasses.replace(made, scorer=type(self).__name__, settings={**made.settings, **own})

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Score N conversations that end with a reply.

        Raises:
            ScoringError: some rows have no verdict; the error's `scores` has the scores of the others.
            ConfigError: the judge cannot be used at all, for example because its server refuses the key.
        """
        check_rows(conversations, prompts)
        deadline = time.monotonic() + self.options.timeout
        errors: list[str | None] = [None] * len(conversations)
        checked: dict[int, Conversation] = {}
        for row, conversation in enumerate(conversations):
            try:
                read = check_conversation(conversation)
                if (role := read[-1]["role"]) != "assistant":
                    raise ConversationError(
                        f"the last message must be a reply, with the role 'assistant'; got {role!r:.100}."
                    )
                checked[row] = read
            except ConversationError as error:
                errors[row] = str(error)
        given = prompts if prompts is not None else [None] * len(conversations)
        asks: dict[tuple[str, int], _Ask] = {}
        cases = self._cases(checked, given, errors, asks)
        self._ask(list(asks.values()), deadline)
        scores = self._scores(cases, errors)
        return dataclasses.replace(scores, provenance=self.provenance).mark_failures().raise_for_errors()

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

    def _cases(
        self,
        checked: Mapping[int, Conversation],
        prompts: Sequence[Prompt | None],
        errors: list[str | None],
        asks: dict[tuple[str, int], _Ask],
    ) -> list[_Case]:
        """Return what has to be judged; rows for which that is impossible get an error."""
        cases = []
        for rows, replies in self._pairs(checked, prompts, errors):
            row = next(row for row in rows if row is not None)
            case = _Case(rows)
            prompt = prompts[row]
            answer = prompt.answer if prompt is not None and self.options.reference else None
            try:
                orders = (
                    [replies] if len(replies) == 1 else [replies, replies[::-1]] if replies[0] != replies[1] else []
                )
                for order in orders:
                    question = self._rubric.question(checked[row][:-1], order, reference=answer, prompt=prompt)
                    for sample in range(self.options.samples):
                        ask = _Ask(question, seed_of(question.messages, sample))
                        case.asks.append(asks.setdefault((question.mark, ask.seed), ask))
            except ConversationError as error:
                for judged in rows:
                    if judged is not None:
                        errors[judged] = str(error)
            else:
                cases.append(case)
        return cases

    def _pairs(
        self, checked: Mapping[int, Conversation], prompts: Sequence[Prompt | None], errors: list[str | None]
    ) -> list[tuple[tuple[int | None, ...], list[Message]]]:
        """Return the rows that are judged together, and their replies."""
        if self.options.mode == "score":
            return [((row,), [conversation[-1]]) for row, conversation in checked.items()]
        pairs: list[tuple[tuple[int | None, ...], list[Message]]] = []
        if self.options.against == "reference":
            for row, conversation in checked.items():
                prompt = prompts[row]
                baseline = None if prompt is None else prompt.metadata.get("reference_reply")
                if isinstance(baseline, str):
                    pairs.append(((row, None), [conversation[-1], Message(role="assistant", content=baseline)]))
                else:
                    errors[row] = "there is no text in prompt.metadata['reference_reply'] to compare the reply with"
            return pairs
        groups: dict[str, list[int]] = {}
        for row, conversation in checked.items():
            groups.setdefault(repr(list(conversation[:-1])), []).append(row)
        for rows in groups.values():
            if len(rows) == 1:
                errors[rows[0]] = "there is no other reply to the same prompt in this call to compare with"
            pairs += [((a, b), [checked[a][-1], checked[b][-1]]) for a, b in itertools.combinations(rows, 2)]
        return pairs

    def _ask(self, asks: list[_Ask], deadline: float) -> None:
        """Ask until every question has a verdict or an error."""
        for attempt in range(1 + self.options.max_retries):
            if not asks or (attempt and time.monotonic() >= deadline):
                break
            replies = self.model.reply(
                [self._messages(ask) for ask in asks], seeds=[ask.seed + attempt for ask in asks], deadline=deadline
            )
            for ask, reply in zip(asks, check_replies(self.model, replies, len(asks)), strict=True):
                self._take(ask, reply)
            asks = [ask for ask in asks if ask.verdict is None and ask.error is None]
        late = f" within timeout={self.options.timeout:g}" if time.monotonic() >= deadline else ""
        for ask in asks:
            ask.error = (
                f"the judge gave no verdict{late} in {ask.answers} answers: {ask.reason}; its last: {ask.text[-100:]!r}"
            )

    def _take(self, ask: _Ask, reply: ChatReply) -> None:
        """Read the verdict of an answer."""
        if reply.error is not None:
            ask.error = f"no answer of the judge: {reply.error}"
            return
        ask.answers, ask.text = ask.answers + 1, reply.text
        if not reply.finished:
            ask.reason = "it was cut at max_new_tokens" if reply.text else "it was empty, or cut at max_new_tokens"
            return
        mark = ask.question.mark if self.options.marked else None
        try:
            if self.options.mode == "score":
                ask.verdict = read_score(reply.text, scale=self.options.scale, mark=mark)
            else:
                ask.verdict = read_choice(reply.text, mark=mark)
        except NoVerdict as error:
            ask.reason = str(error)

    def _messages(self, ask: _Ask) -> list[Message]:
        """Return the conversation with the judge. After an answer without a verdict, only the verdict is asked for."""
        messages = list(ask.question.messages)
        if not ask.answers:
            return messages
        again = Message(role="user", content=AGAIN + self._rubric.verdict(ask.question.mark))
        return [*messages, Message(role="assistant", content=ask.text or "..."), again]

    def _scores(self, cases: Sequence[_Case], errors: list[str | None]) -> Scores:
        """Return the scores of all rows.

        A row that has no verdict at all, such as a reply that is too long for the judge, does not take those that it is
        compared with along.
        """
        of_row: dict[int, list[_Case]] = {}
        for case in cases:
            for row in case.rows:
                if row is not None:
                    of_row.setdefault(row, []).append(case)
        lost = {row for row, own in of_row.items() if all(case.error is not None for case in own)}
        rewards = np.full(len(errors), np.nan)
        infos: dict[str, list[Any]] = {"judgement": [None] * len(errors)}
        numbers = ["disagreement"] + (["position_consistent"] if self.options.mode == "pairwise" else [])
        infos |= {name: [np.nan] * len(errors) for name in numbers}
        for row, own in of_row.items():
            counted = [case for case in own if row in lost or not lost & set(case.rows)]
            errors[row] = errors[row] or next((case.error for case in counted if case.error is not None), None)
            if errors[row] is None:
                rewards[row] = self._reward(row, counted, infos)
        return Scores.from_rewards(rewards, errors=errors, infos=infos)

    def _reward(self, row: int, cases: Sequence[_Case], infos: Mapping[str, list[Any]]) -> float:
        """Return the reward of a row from its verdicts, and write its infos."""
        asks = [ask for case in cases for ask in case.asks]
        infos["judgement"][row] = asks[0].text if asks else ""
        if self.options.mode == "score":
            values = np.array([ask.verdict for ask in asks])
            infos["disagreement"][row] = values.std()
            return float(values.mean())
        compared = [_outcomes(case) for case in cases]
        infos["disagreement"][row] = np.mean([outcomes.std() for outcomes, _ in compared])
        infos["position_consistent"][row] = np.mean([consistent for _, consistent in compared])
        means = [outcomes.mean() for outcomes, _ in compared]
        return float(np.mean([m if case.rows[0] == row else 1 - m for case, m in zip(cases, means, strict=True)]))


def _outcomes(case: _Case) -> tuple[NDArray[np.float64], float]:
    """Return 1 (the first reply is better), 0.5 or 0 for each sample, and the share of those that keep their verdict.

    A verdict that changes with the places of the replies says nothing about them, so it is a tie.
    """
    if not case.asks:
        return np.array([0.5]), 1.0
    half = len(case.asks) // 2
    first = np.array([OUTCOMES[ask.verdict] for ask in case.asks[:half]])
    swapped = np.array([1 - OUTCOMES[ask.verdict] for ask in case.asks[half:]])
    return np.where(first == swapped, first, 0.5), float((first == swapped).mean())
