import pytest

from gym_rm.errors import ConfigError
from gym_rm.scorers.judge.scorer import JudgeScorer
from tests.evaluation.benchmarks.stored import LengthOfReply, evaluate_benchmark
from tests.scorers.judge.test_scorer import Judge, by_length


def pair(first, second, label, source="mmlu-pro-law"):
    return {"source": source, "question": "q", "response_A": first, "response_B": second, "label": label}


def test_pairs_are_scored_and_equal_scores_are_wrong():
    rows = [pair("aa", "a", "A>B"), pair("aa", "a", "B>A"), pair("a", "b", "A>B"), pair("a", "aa", "B>A", "elsewhere")]
    result = evaluate_benchmark("judge-bench", LengthOfReply(), rows)
    assert result.subsets == {"elsewhere": 1.0, "mmlu-pro": pytest.approx(1 / 3)}
    assert result.overall == 0.5
    assert result.details == {"ties": 1}
    assert result.missing == ("livebench-reasoning", "livebench-math", "livecodebench")


def test_a_judge_is_asked_in_both_orders_and_a_pair_that_it_refuses_is_in_no_value():
    """The second pair asks the same question as the first one, and the third is refused."""

    def answer(replies, mark, _):
        return "I cannot." if "secret" in replies else by_length(replies, mark, _)

    rows = [pair("aa", "a", "A>B"), pair("aaaa", "aaa", "B>A"), pair("secret", "a", "A>B")]
    judge = JudgeScorer(Judge(answer), mode="pairwise", comparisons="all_pairs", max_retries=0)
    result = evaluate_benchmark("judge-bench", judge, rows)
    assert (result.overall, result.counts) == (0.5, {"mmlu-pro": 2})
    assert list(result.failed) == ["rows[2]"]
    assert len(judge.model.conversations) == result.judge.num_questions == 6
    assert result.judge.refused.value == pytest.approx(1 / 3)
    assert result.judge.notes()[0] == "It gave no verdict on 33.3% of 6 questions."


def test_a_judge_that_takes_the_first_place_has_ties_which_are_wrong():
    judge = JudgeScorer(Judge(lambda replies, mark, _: f"Verdict {mark}: A"), mode="pairwise", comparisons="all_pairs")
    result = evaluate_benchmark("judge-bench", judge, [pair("aa", "a", "A>B"), pair("aa", "a", "B>A")])
    assert (result.overall, result.details) == (0.0, {"ties": 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [({"label": "A=B"}, "'label' must be one of"), ({"source": None}, "'source' must be a text")],
)
def test_invalid_rows_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        evaluate_benchmark("judge-bench", LengthOfReply(), [{**pair("a", "b", "A>B"), **change}])
