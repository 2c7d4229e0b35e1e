import pytest

from gym_rm.errors import ConfigError
from gym_rm.evaluation.benchmarks.by_name import evaluate_benchmark
from tests.evaluation.benchmarks.stored import LengthOfReply


def pair(first, second, label, source="mmlu-pro-law"):
    return {"source": source, "question": "q", "response_A": first, "response_B": second, "label": label}


def test_pairs_are_scored_and_equal_scores_are_wrong():
    rows = [pair("aa", "a", "A>B"), pair("aa", "a", "B>A"), pair("a", "b", "A>B"), pair("a", "aa", "B>A", "elsewhere")]
    result = evaluate_benchmark("judge-bench", LengthOfReply(), rows, model="m")
    assert result.subsets == {"elsewhere": 1.0, "mmlu-pro": pytest.approx(1 / 3)}
    assert result.overall == 0.5
    assert result.details == {"ties": 1}
    assert result.missing == ("livebench-reasoning", "livebench-math", "livecodebench")


@pytest.mark.parametrize(
    ("change", "message"),
    [({"label": "A=B"}, "'label' must be one of"), ({"source": None}, "'source' must be a text")],
)
def test_invalid_rows_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        evaluate_benchmark("judge-bench", LengthOfReply(), [{**pair("a", "b", "A>B"), **change}])
