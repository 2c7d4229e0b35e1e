import pytest

from gym_rm.errors import ConfigError
from gym_rm.evaluation.benchmarks.by_name import BENCHMARKS
from gym_rm.evaluation.benchmarks.rows import read_benchmark
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


def judged(answer, rows):
    judge = JudgeScorer(Judge(answer), mode="pairwise", comparisons="all_pairs", max_retries=0)
    return evaluate_benchmark("judge-bench", judge, rows), judge


def test_a_judge_is_asked_in_both_orders_and_a_pair_that_it_refuses_stays_in_the_denominator():
    """The second pair asks the same question as the first one, and the third is refused."""

    def answer(replies, mark, _):
        return "I cannot." if "secret" in replies else by_length(replies, mark, _)

    rows = [pair("aa", "a", "A>B"), pair("aaaa", "aaa", "B>A"), pair("secret", "a", "A>B")]
    result, judge = judged(answer, rows)
    assert (result.overall, result.counts, result.details) == (1 / 3, {"mmlu-pro": 3}, {"ties": 1})
    assert list(result.failed) == ["rows[2]"]
    assert result.notes()[-1].startswith("Rows without a score, a missing verdict counts 0: 1; the first is rows[2]")
    assert len(judge.model.conversations) == result.judge.num_questions == 6
    assert result.judge.refused.value == pytest.approx(1 / 3)
    assert result.judge.notes()[0] == "It gave no verdict on 33.3% of 6 questions."


RIGHT = ["A B", "A tie", "tie B", "A none", "none B"]


@pytest.mark.parametrize("verdicts", [*RIGHT, "A A", "tie tie", "B A", "none tie", "B none", "tie A"])
def test_a_pair_is_right_if_its_two_verdicts_sum_up_to_more_than_zero(verdicts):
    """`good` is the better reply; it is shown first, then second. The second pair is right."""
    rows, (first, second) = [pair("good", "bad", "A>B"), pair("right", "wrong", "A>B")], verdicts.split()

    def answer(replies, mark, _):
        said = {"right": "A", "wrong": "B", "good": first, "bad": second}[replies[0]]
        return f"Verdict {mark}: {said}"

    expected = 1.0 if verdicts in RIGHT else 0.5
    assert judged(answer, rows)[0].overall == expected
    decisions = {"A": {"decision": "A>B"}, "B": {"decision": "B>A"}, "tie": {"decision": "A=B"}, "none": None}
    said = [[decisions[each] for each in two] for two in ((first, second), "AB")]
    assert published([{**row, "judgments": two} for row, two in zip(rows, said, strict=True)]).overall == expected


def published(rows):
    """Return the result of rows with the judgments that JudgeBench publishes."""
    return BENCHMARKS["judge-bench"].result(read_benchmark(rows, BENCHMARKS["judge-bench"].read_row))


def test_published_decisions_are_counted_by_source():
    decisions = {
        "B>A": [("B>A", "A>B"), ("B>A", "A=B"), ("B>A", "B>A"), (None, "A=B")],
        "A>B": [("A=B", "B>A"), ("A>B",)],
    }
    rows = [
        {**pair("a", "b", label, source), "judgments": [{"decision": each} for each in said]}
        for label, every in decisions.items()
        for said, source in zip(every, ["mmlu-pro-law", "livebench-math"] * 2, strict=False)
    ]
    result = published(rows)
    assert result.subsets == {"livebench-math": 2 / 3, "mmlu-pro": 2 / 3}
    assert (result.overall, result.details) == (4 / 6, {"ties": 2})


def test_a_judge_that_takes_the_first_place_has_ties_which_are_wrong():
    judge = JudgeScorer(Judge(lambda replies, mark, _: f"Verdict {mark}: A"), mode="pairwise", comparisons="all_pairs")
    result = evaluate_benchmark("judge-bench", judge, [pair("aa", "a", "A>B"), pair("aa", "a", "B>A")])
    assert (result.overall, result.details) == (0.0, {"ties": 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": "A=B"}, "'label' must be one of"),
        ({"source": None}, "'source' must be a text"),
        ({"judgments": [{"score": 1}]}, "must be 1 or 2, null or with a 'decision'"),
        ({"judgments": [None] * 3}, "must be 1 or 2, null or with a 'decision'"),
        ({"judgments": []}, "'judgments' must be a list of at least one"),
    ],
)
def test_invalid_rows_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        evaluate_benchmark("judge-bench", LengthOfReply(), [{**pair("a", "b", "A>B"), **change}])
