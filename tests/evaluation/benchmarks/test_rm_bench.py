"""RM-Bench. The golden numbers were computed once from `random_rows(0)` with `compute_accuracy` of its repository."""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gym_rm
from gym_rm.errors import ConfigError
from gym_rm.evaluation.benchmarks.rm_bench import difficulty_scores, style_matrix
from tests.evaluation.benchmarks.stored import LengthOfReply, StoredScores, evaluate_benchmark


def random_rows(seed):
    generator = random.Random(seed)
    domains = ["chat", "math", "code", "safety-refuse", "safety-response"] * 6
    return [
        {
            "id": index,
            "domain": domain,
            "score_chosen": [float(generator.randint(0, 6)) for _ in range(3)],
            "score_rejected": [float(generator.randint(0, 5)) for _ in range(3)],
        }
        for index, domain in enumerate(domains[:-1])
    ]


def test_values_are_the_golden_ones():
    stored = random_rows(0)
    rows = [{"domain": each["domain"], "prompt": "p", "chosen": ["a"] * 3, "rejected": ["b"] * 3} for each in stored]
    scores = [score for each in stored for score in each["score_chosen"] + each["score_rejected"]]
    result = evaluate_benchmark("rm-bench", StoredScores(scores), rows)
    golden = {
        "chat": 0.5740740740740741,
        "math": 0.5925925925925926,
        "code": 0.48148148148148145,
        "safety": 0.5050505050505051,
        "hard": 0.5265151515151515,
        "normal": 0.523989898989899,
        "easy": 0.5643939393939393,
    }
    assert result.subsets == pytest.approx(golden, rel=1e-12)
    assert result.overall == pytest.approx(0.5382996632996633, rel=1e-12)
    assert result.counts == {"chat": 6, "code": 6, "math": 6, "safety": 11}


def test_a_model_that_likes_style_is_right_on_easy_and_wrong_on_hard_comparisons():
    matrix = style_matrix([[0.0, 1.0, 2.0, -0.5, 0.5, 1.5]])
    assert matrix.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert difficulty_scores(matrix) == {"hard": 0.0, "normal": 1.0, "easy": 1.0}


def test_equal_scores_are_wrong():
    assert not style_matrix([[1.0] * 6]).any()


@given(st.lists(st.lists(st.integers(0, 4), min_size=6, max_size=6), min_size=1, max_size=5))
def test_the_matrix_counts_every_comparison(rows):
    expected = [
        [np.mean([row[chosen] > row[3 + rejected] for row in rows]) for rejected in range(3)] for chosen in range(3)
    ]
    assert style_matrix(rows).tolist() == expected


class Shouting:
    """Scorer whose reward is the number of capitals in the reply."""

    def score(self, conversations, prompts=None):
        return gym_rm.Scores.from_rewards([sum(map(str.isupper, each[-1]["content"])) for each in conversations])


def test_a_file_of_one_domain_is_scored_and_the_others_are_named(tmp_path):
    rows = [{"id": 1, "prompt": "p", "chosen": ["a", "Aa", "AAa"], "rejected": ["b", "b", "Bb"], "error": "kept"}]
    path = tmp_path / "safety-refuse_filtered.json"
    path.write_text(json.dumps(rows))
    result = evaluate_benchmark("rm-bench", Shouting(), path)
    assert result.details["matrices"]["safety"] == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert result.subsets == pytest.approx({"safety": 5 / 9, "hard": 0.0, "normal": 2 / 3, "easy": 1.0})
    assert result.missing == ("chat", "math", "code")


ROW = {"domain": "chat", "prompt": "p", "chosen": ["a"] * 3, "rejected": ["b"] * 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": ["a"]}, "'chosen' must be a list of 3 entries"),
        ({"domain": "law"}, "'domain' must begin with one of"),
        ({"domain": None}, "got None. Without this field, the name of the"),
    ],
)
def test_invalid_rows_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        evaluate_benchmark("rm-bench", LengthOfReply(), [{**ROW, **change}])
