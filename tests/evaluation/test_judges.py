"""What a judge is worth: refusals, place bias, samples and cost of scripted and served judges, known in advance."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gym_rm
from gym_rm.data.comparisons import ComparisonSet
from gym_rm.evaluation.judges import JudgeRecord, judge_report
from gym_rm.evaluation.report import evaluate_set, notes
from gym_rm.evaluation.scored import (
    RowScores,
    ScoredComparisons,
    comparisons_of,
    digest_of,
    score_comparisons,
)
from gym_rm.evaluation.stored_scores.store import ScoreStore
from gym_rm.generation.chat import ChatReply
from gym_rm.scorers.judge.scorer import JudgeScorer
from tests.cli.command import LengthScorer
from tests.evaluation.comparisons import comparison
from tests.scorers.judge.test_scorer import Judge, by_length

IN_GROUPS = {"mode": "pairwise", "comparisons": "all_pairs"}
ROWS = [comparison([f"{i} is right", f"{i}"], (0, 1), prompt=f"q{i % 10}") for i in range(40)]


def scored(answer, rows=ROWS, **options):
    """Return rows scored by a scripted judge, and its model."""
    judge = JudgeScorer(Judge(answer), **options)
    plain = dataclasses.asdict(judge.provenance)
    return ScoredComparisons(tuple(rows), score_comparisons(judge, rows), "judge", plain), judge.model


def first_place(share):
    """Return a judge that takes the first place in this share of the questions, else the longer reply."""

    def answer(replies, mark, _):
        number = int(min(replies, key=len))
        return f"Verdict {mark}: A" if number < share * len(ROWS) else by_length(replies, mark, _)

    return answer


@pytest.mark.parametrize(("share", "first"), [(0.0, 0.5), (0.25, 0.625), (1.0, 1.0)])
def test_a_known_place_bias_is_found(share, first):
    report = scored(first_place(share), **IN_GROUPS)[0].judge()
    assert report.prefers_first.value == pytest.approx(first)
    assert report.position_consistent.value == pytest.approx(1 - share)
    assert report.prefers_first.low < first or first == 0.5
    assert [note.split("%")[1] for note in report.notes()[:1]] == [
        " of its choices are the reply that it was shown first."
    ] * (share > 0)


class Undecided(Judge):
    """Prefers the reply shown first by 0.4 to 0.2."""

    def choose(self, conversations, choices, *, begin, deadline):
        return [ChatReply("A", finished=True, num_tokens=9, masses={"A": 0.4, "B": 0.2}) for _ in conversations]


def test_the_probability_of_the_verdicts_is_in_the_report():
    judge = JudgeScorer(Undecided(by_length), verdict="probabilities", **IN_GROUPS)
    rows = ScoredComparisons(tuple(ROWS), score_comparisons(judge, ROWS), "judge", dataclasses.asdict(judge.provenance))
    report = rows.judge()
    assert (report.verdict_mass.value, report.refused.value) == (pytest.approx(0.6), 0.0)
    assert (report.prefers_first.value, report.position_consistent.value) == (1.0, 0.0)
    assert {reward for row in rows.scores for reward in row.rewards} == {0.5}


def test_a_known_share_of_refusals_is_found_and_their_pairs_are_left_out():
    def answer(replies, mark, _):
        return "I will not say." if int(min(replies, key=len)) % 4 == 0 else by_length(replies, mark, _)

    found, model = scored(answer, max_retries=1, **IN_GROUPS)
    report = found.judge()
    assert report.refused.value == pytest.approx(0.25)
    assert report.refused.low < 0.25 < report.refused.high
    assert report.answers_per_verdict == pytest.approx(len(model.conversations) / 60)
    evaluation = evaluate_set(ComparisonSet("set", tuple(ROWS)), found)
    assert (evaluation.first.preferences.num_failed, evaluation.first.preferences.accuracy.value) == (10, 1.0)
    assert "It gave no verdict on 25.0% of 80 questions." in notes(evaluation)


def test_the_difference_of_samples_is_known_only_with_several():
    class Alternating(Judge):
        def reply(self, conversations, *, seeds, deadline=math.inf):
            replies = super().reply(conversations, seeds=seeds, deadline=deadline)
            marks = [reply.text.split(":")[0] for reply in replies]
            return [ChatReply(f"{mark}: {4 + 2 * (k % 2)}", finished=True) for k, mark in enumerate(marks)]

    for samples, expected in ((2, 1.0), (1, None)):
        judge = JudgeScorer(Alternating(by_length), samples=samples)
        plain = dataclasses.asdict(judge.provenance)
        found = ScoredComparisons(tuple(ROWS), score_comparisons(judge, ROWS), "judge", plain)
        assert found.judge().disagreement == expected


def test_a_judge_within_a_combined_scorer_is_counted():
    combined = gym_rm.load_scorer(
        {"kind": "weighted", "scorers": {"judge": JudgeScorer(Judge(by_length), **IN_GROUPS), "length": LengthScorer()}}
    )
    report = ScoredComparisons(tuple(ROWS), score_comparisons(combined, ROWS)).judge()
    assert (report.num_questions, report.refused.value, report.prefers_first) == (80, 0.0, None)


# --- files -------------------------------------------------------------------------------------------------------


def test_a_file_gives_back_the_same_report_and_older_files_have_none(tmp_path):
    found, _ = scored(first_place(0.25), **IN_GROUPS)
    store = ScoreStore(tmp_path / "scores.jsonl")
    store.start({"model": "judge", "provenance": {"settings": {"samples": 1}}})
    store.add({digest_of(row): each.as_entry() for row, each in zip(ROWS, found.scores, strict=True)})
    store.close()
    assert comparisons_of(ScoreStore.read(store.path), ROWS).judge() == found.judge()
    lines = [json.loads(line) for line in store.path.read_text().splitlines()]
    for line in lines:
        line.pop("judge", None)
    store.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    older = comparisons_of(ScoreStore.read(store.path), ROWS)
    assert older.judge() is None
    assert [row.rewards for row in older.scores] == [row.rewards for row in found.scores]


numbers = st.one_of(st.just(math.nan), st.floats(0, 1e6))


@given(st.builds(JudgeRecord, st.integers(0, 50).map(float), *[numbers] * 8))
def test_an_entry_gives_back_every_number(record):
    row = RowScores((1.0, 0.0), (None, None), judge=record)
    assert repr(RowScores.from_entry(json.loads(json.dumps(row.as_entry())))) == repr(row)


def test_a_row_without_questions_and_unknown_infos_are_no_numbers():
    infos = {"judge_questions": np.array([np.nan, np.nan]), "judge_tokens": np.array([np.nan, np.nan])}
    record = JudgeRecord.of(infos, slice(0, 2), seconds=1.0)
    assert (record.judge_questions, record.seconds, math.isnan(record.judge_tokens)) == (0.0, 0.0, True)
    assert judge_report([record], samples=None) is None
