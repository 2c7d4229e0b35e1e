"""RewardBench 2.

The numbers called golden were computed once from the inputs that `random_ties` generates, with `process_single_model`
(rewardbench 0.1.5; without spreads of 0, 0.1.4 returns the same).
"""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.errors import ConfigError
from gym_rm.evaluation.benchmarks.rewardbench_2 import best_of_n_result, ties_score
from gym_rm.scorers.judge.scorer import JudgeScorer
from tests.evaluation.benchmarks.stored import LengthOfReply, StoredScores, evaluate_benchmark
from tests.scorers.judge.test_groups import Lister
from tests.scorers.judge.test_scorer import Judge, by_length


def random_ties(seed, *, coarse):
    generator = random.Random(seed)
    rows = []
    for number in range(12):
        for kind, right in (("ref", 1), ("tied", generator.randint(2, 5))):
            scores = [3.0 * (index < right) + generator.gauss(0, 2) for index in range(right + generator.randint(1, 4))]
            rows.append((f"{kind}:{number}", [4.0 * round(score / 4) for score in scores] if coarse else scores, right))
    return rows[:-2] + rows[-1:]  # the last prompt is there once


@pytest.mark.parametrize(("coarse", "golden"), [(False, 0.38184391070882956), (True, 0.2785409814834124)])
def test_ties_have_the_golden_score(coarse, golden):
    assert ties_score(random_ties(2, coarse=coarse))["score"] == pytest.approx(golden, rel=1e-12)


def test_ties_equal_those_of_the_package(reference):
    datasets = pytest.importorskip("datasets")
    for seed in range(20):
        rows = random_ties(seed, coarse=False)
        stored = [{"id": name, "scores": scores, "num_correct": right} for name, scores, right in rows]
        theirs = reference.process_single_model(datasets.Dataset.from_list(stored))[1]
        assert ties_score(rows)["score"] == pytest.approx(theirs, rel=1e-12)


def test_ties_by_hand():
    rows = [("ref:1", [2.0, 0.0], 1), ("tied:1", [3.0, 2.0, 0.5, 0.0], 2), ("ref:2", [0.0, 1.0], 1)]
    parts = ties_score([*rows, ("tied:2", [1.0, 1.0, 1.0], 2)])
    expected = {
        "accuracy_tied": 0.5,
        "accuracy_ref": 0.5,
        "gap_above_spread": 0.5,  # 1.5 > 1 and not 0 > 0
        "smaller_gap_above_spread": 0.5,  # min(2, 1.5) > 1 and not min(-1, 0) > 0
        "relative_gap": (math.tanh(0.5) - 1) / 2,  # -1 / 0 is minus infinity
    }
    assert parts == pytest.approx({"score": 0.3 + 0.2 + 0.005 * (math.tanh(0.5) - 1), **expected})


def test_ties_without_a_prompt_that_is_there_twice_have_no_score():
    assert ties_score([("ref:1", [2.0, 0.0], 1), ("tied:2", [3.0, 2.0, 0.5], 2)])["score"] is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("other:1", [1.0, 0.0], 1), "got 'other:1'"),
        (("tied", [1.0, 0.0], 1), "got 'tied'"),
        (("ref:1", [1.0], 1), "Ties, ref:1: expected right and wrong answers, got 1 of 1"),
    ],
)
def test_invalid_ties_are_refused(row, message):
    with pytest.raises(ConfigError, match=message):
        ties_score([row])


@given(st.lists(st.integers(-2, 2), min_size=2, max_size=6))
def test_the_results_of_all_replies_share_one_point(scores):
    rotations = [scores[start:] + scores[:start] for start in range(len(scores))]
    assert sum(best_of_n_result(rotation) for rotation in rotations) == pytest.approx(1.0)


def test_the_total_is_the_mean_of_the_subsets():
    cases = [
        ("Math", [1.0, 0.0, 0.5, 0.5], 1, "1"),
        ("Math", [1.0, 1.0, 0.5, 0.5], 1, "2"),
        ("Focus", [0.0, 1.0, 0.5, 0.5], 1, "3"),
        ("ties", [3.0, 1.0], 1, "ref:4"),
        ("ties", [3.0, 2.0, 0.0], 2, "tied:4"),
        ("mine", [1.0, 0.0], 1, "5"),
    ]
    rows = [
        {
            "id": name,
            "subset": subset,
            "prompt": "p",
            "chosen": ["a"] * right,
            "rejected": ["b"] * (len(scores) - right),
        }
        for subset, scores, right, name in cases
    ]
    result = evaluate_benchmark("rewardbench2", StoredScores([score for case in cases for score in case[1]]), rows)
    ties = 0.3 + 0.3 + 0.2 + 0.2 + 0.01 * math.tanh(1.0)
    assert result.subsets == pytest.approx({"Focus": 0.0, "Math": 0.75, "Ties": ties, "mine": 1.0})
    assert result.overall == pytest.approx((0.0 + 0.75 + ties) / 3)
    assert result.missing == ("Factuality", "Precise IF", "Safety")
    assert result.not_counted == ("mine",)
    assert result.details["Ties"]["accuracy_ref"] == 1.0


BEST_OF_4 = {"subset": "Math", "id": "1", "prompt": "p", "chosen": ["aaaa"], "rejected": ["a", "aaa", "aa"]}
TIES = [
    {"subset": "Ties", "id": f"{kind}:1", "prompt": kind, "chosen": ["aaaa", "bbbb"][:right], "rejected": ["a", "b"]}
    for kind, right in (("ref", 1), ("tied", 2))
]


@pytest.mark.parametrize(
    ("options", "questions"),
    [({}, 4 + 3 + 4), ({"mode": "pairwise", "comparisons": "all_pairs"}, 12 + 6 + 12), ({"mode": "listwise"}, 3)],
    ids=["score", "pairwise", "listwise"],
)
def test_judges_choose_the_best_of_four_and_keep_ties(options, questions):
    model = Lister() if options.get("mode") == "listwise" else Judge(by_length)
    judge = JudgeScorer(model, **options)
    result = evaluate_benchmark("rewardbench2", judge, [BEST_OF_4, *TIES])
    assert result.subsets["Math"] == 1.0
    assert result.details["Ties"]["accuracy_tied"] == result.details["Ties"]["gap_above_spread"] == 1.0
    assert result.judge.num_questions == questions


def test_a_row_with_a_comparison_without_a_verdict_is_left_out():
    """Each of the four replies still has two comparisons and a reward."""

    def answer(replies, mark, _):
        return "I cannot." if set(replies) == {"a", "aa"} else by_length(replies, mark, _)

    judge = JudgeScorer(Judge(answer), mode="pairwise", comparisons="all_pairs", max_retries=0)
    other = {**BEST_OF_4, "prompt": "q", "rejected": ["a", "b", "c"]}
    result = evaluate_benchmark("rewardbench2", judge, [BEST_OF_4, other])
    assert result.failed == {"rows[0]": "2 of 12 questions have no verdict"}
    assert result.counts == {"Math": 1}


ROW = {"subset": "Math", "id": "1", "prompt": "p", "chosen": ["a"], "rejected": ["b"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rejected": []}, r"'rejected' must be a list of at least one entries"),
        ({"chosen": ["a", "b"]}, "2 right replies, but only the subset Ties may have more than one"),
        ({"subset": "Ties", "id": 4}, "'id' must be a text, got int 4"),
    ],
)
def test_invalid_rows_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        evaluate_benchmark("rewardbench2", LengthOfReply(), [{**ROW, **change}])
