"""JudgeBench. The golden numbers were computed once with `compute_final_metrics` of its repository.

With the files that its repository publishes, `evaluate_judge_bench` returns the published totals: 62.29 for
Skywork-Reward-Llama-3.1-8B, 64.29 for Skywork-Reward-Gemma-2-27B, 59.43 for GRM-Gemma-2B and internlm2-7b-reward, 63.43
for internlm2-20b-reward, 65.71 for o1-mini. These rows have no licence and are not here.
"""

import itertools
import random

import pytest

import gym_rm
from gym_rm.errors import ConfigError
from gym_rm.evaluation.judge_bench import agreement, evaluate_judge_bench

DECISIONS = ("A>B", "B>A", "A=B", None)
SOURCES = ("mmlu-pro-law", "mmlu-pro-math", "livebench-reasoning", "livebench-math", "livecodebench")


def random_rows(seed):
    generator = random.Random(seed)
    return [
        {
            "pair_id": str(number),
            "source": generator.choice(SOURCES),
            "label": generator.choice(DECISIONS[:2]),
            "judgments": [
                {"decision": generator.choice(DECISIONS)} if generator.random() < 0.9 else None for _ in range(2)
            ],
        }
        for number in range(200)
    ]


def test_values_are_the_golden_ones():
    result = evaluate_judge_bench(None, random_rows(0))
    golden = {
        "livebench-math": 41.1764705882353,
        "livebench-reasoning": 42.10526315789474,
        "livecodebench": 29.166666666666668,
        "mmlu-pro": 33.75,
    }
    assert {source: 100 * value for source, value in result.subsets.items()} == pytest.approx(golden, rel=1e-12)
    assert 100 * result.overall == pytest.approx(35.5, rel=1e-12)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(DECISIONS, DECISIONS)))
def test_exchanging_the_names_of_the_replies_changes_nothing(first, second):
    assert agreement("A>B", [first, second]) == agreement("B>A", [second, first])


@pytest.mark.parametrize(
    ("decisions", "expected"),
    [
        (["A>B", "B>A"], 2),
        (["A>B", "A=B"], 1),
        (["A>B", None], 1),
        (["A>B", "A>B"], 0),
        (["A=B", "A=B"], 0),
        (["B>A", "A=B"], -1),
        (["B>A", "A>B"], -2),
        (["A>B"], 1),
        (["B>A"], -1),
    ],
)
def test_the_second_decision_is_turned(decisions, expected):
    assert agreement("A>B", decisions) == expected


class ByLength:
    def score(self, conversations, prompts=None):
        return gym_rm.Scores.from_rewards([len(conversation[-1]["content"]) for conversation in conversations])


def pair(first, second, label, source="mmlu-pro-law"):
    return {
        "pair_id": "x",
        "source": source,
        "question": "q",
        "response_A": first,
        "response_B": second,
        "label": label,
    }


def test_pairs_are_scored_and_equal_scores_are_wrong():
    rows = [pair("aa", "a", "A>B"), pair("aa", "a", "B>A"), pair("a", "b", "A>B"), pair("a", "aa", "B>A", "elsewhere")]
    result = evaluate_judge_bench(ByLength(), rows, model="m")
    assert result.subsets == {"elsewhere": 1.0, "mmlu-pro": pytest.approx(1 / 3)}
    assert result.overall == 0.5
    assert result.details == {"ties": 1}
    assert result.missing == ("livebench-reasoning", "livebench-math", "livecodebench")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"source": "mmlu-pro", "judgments": [None]}, "'label' must be one of"),
        ({"source": "mmlu-pro", "label": "A=B", "judgments": [None]}, "'label' must be one of"),
        ({"source": "mmlu-pro", "label": "A>B"}, "'judgments' must be a list"),
        ({"source": "mmlu-pro", "label": "A>B", "judgments": ["A>B"]}, "one or two objects with a 'decision'"),
        ({"label": "A>B", "judgments": [None]}, "'source' must be a text"),
    ],
)
def test_invalid_rows_are_refused(row, message):
    with pytest.raises(ConfigError, match=message):
        evaluate_judge_bench(None, [row])
