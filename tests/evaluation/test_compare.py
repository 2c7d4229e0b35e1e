"""Two models on the same rows: McNemar by hand and paired intervals."""

import pytest

from gym_rm.errors import ConfigError
from gym_rm.evaluation.compare import compare_models, mcnemar_exact
from tests.evaluation.comparisons import comparison, scored

ROWS = [comparison(["yes", "no"], (0, 1), prompt=f"question {i}") for i in range(12)]


@pytest.mark.parametrize(
    ("only_first", "only_second", "expected"),
    [
        (0, 0, pytest.approx(1.0)),
        (5, 5, pytest.approx(1.0)),
        (1, 9, pytest.approx(2 * (1 + 10) / 1024)),
        (0, 6, pytest.approx(2 / 64)),
        (10, 3, pytest.approx(2 * (1 + 13 + 78 + 286) / 2**13)),
        (100_000, 100_400, pytest.approx(0.37, abs=0.01)),
    ],
)
def test_mcnemar_by_hand(only_first, only_second, expected):
    assert mcnemar_exact(only_first, only_second) == expected


def test_counts_difference_and_agreement():
    first = scored(ROWS, [[1, 0]] * 9 + [[0, 1]] * 3, model="A")
    second = scored(ROWS, [[1, 0]] * 6 + [[0, 1]] * 6, model="B")
    found = compare_models(first, second)
    assert (found.num_pairs, found.num_prompts, found.accuracy) == (12, 12, (0.75, 0.5))
    assert (found.only_first, found.only_second, found.agreement) == (3, 0, 0.75)
    assert found.mcnemar == pytest.approx(0.25)
    assert found.difference.value == pytest.approx(0.25)
    assert 0 <= found.difference.low < 0.25 < found.difference.high


def test_a_model_does_not_differ_from_itself_on_another_scale():
    first = scored(ROWS, [[i, 4] for i in range(12)])
    second = scored(ROWS, [[10 * i, 40] for i in range(12)])
    found = compare_models(first, second)
    assert (found.difference.low, found.difference.high, found.mcnemar, found.agreement) == (0, 0, 1, 1)


def test_pairs_that_one_model_could_not_score_are_left_out_for_both():
    first = scored(ROWS[:3], [[1, 0], [1, None], [1, 0]])
    second = scored(ROWS[:3], [[1, 0], [1, 0], [None, 0]])
    found = compare_models(first, second)
    assert (found.num_pairs, found.accuracy) == (1, (1.0, 1.0))


@pytest.mark.parametrize(
    ("rewards", "rows", "message"),
    [([[1, None]], ROWS[:1], "no pair has rewards of both"), ([[1, 0]], ROWS[1:2], "the same rows")],
)
def test_models_without_a_pair_in_common_are_an_error(rewards, rows, message):
    with pytest.raises(ConfigError, match=message):
        compare_models(scored(ROWS[:1], rewards), scored(rows, [[1, 0]]))


def test_best_of_n_of_two_models_is_compared_by_prompt():
    rows = [comparison("ab", (0, 1), prompt=str(i), correct=(1, 0)) for i in range(8)]
    first, second = scored(rows, [[1, 0]] * 8), scored(rows, [[1, 0]] * 4 + [[0, 1]] * 4)
    found = compare_models(first, second, gold="correct").best_of_n
    assert found.value == 0.5
    assert found.low > 0
