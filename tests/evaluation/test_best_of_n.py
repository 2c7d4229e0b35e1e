"""Best-of-n: the estimator against all subsets, its limits, and curves on graded solutions."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.errors import ConfigError
from gym_rm.evaluation.best_of_n import best_of_n, curve_points, expected_best, kl_bound
from tests.evaluation.comparisons import comparison, scored

REPLIES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=7)


def over_all_subsets(rewards, gold, n):
    """Return the mean gold of the best of every subset of n; ties are broken at random."""
    values = []
    for subset in itertools.combinations(range(len(rewards)), n):
        top = max(rewards[i] for i in subset)
        values.append(np.mean([gold[i] for i in subset if rewards[i] == top]))
    return np.mean(values)


@given(REPLIES)
def test_the_estimator_is_the_mean_over_all_subsets(replies):
    rewards, gold = zip(*replies, strict=True)
    ns = range(1, len(replies) + 1)
    expected = [over_all_subsets(rewards, gold, n) for n in ns]
    assert expected_best(rewards, gold, ns) == pytest.approx(expected)


def test_thousands_of_replies_do_not_overflow():
    values = np.arange(4000.0)
    picked = expected_best(values, values, [1, 64, 4000])
    # The mean of the largest of n of 0, .., N - 1 is n (N + 1) / (n + 1) - 1.
    assert picked == pytest.approx([n * 4001 / (n + 1) - 1 for n in (1, 64, 4000)])


def test_points_of_a_curve():
    assert curve_points(1) == (1,)
    assert curve_points(4) == (1, 2, 3, 4)
    assert curve_points(20) == (1, 2, 3, 4, 5, 6, 7, 8, 16, 20)


def test_the_bound_on_the_divergence():
    assert kl_bound(1) == 0.0
    assert kl_bound(4) == pytest.approx(math.log(4) - 0.75)


def test_failed_replies_and_small_groups_are_left_out_and_counted():
    rows = [
        comparison("abc", (0, 1, 1), prompt="a", correct=(1, 0, 0)),
        comparison("abc", (0, 1, 1), prompt="b", correct=(1, 0, 0)),
        comparison("abc", (0, 1, 1), prompt="c", correct=(1, 0, 0)),
        comparison("ab", (0, 1), prompt="d", correct=(1, 0)),
        comparison("abc", None, prompt="e"),
    ]
    rewards = [[2, 1, 0], [0, 1, 2], [1, None, 0], [1, 0], [0, 0, 0]]
    curve = best_of_n(scored(rows, rewards), gold="correct")
    assert (curve.num_prompts, curve.num_failed, curve.num_small, curve.ns) == (2, 1, 1, (1, 2, 3))
    assert curve.picked[-1].value == 0.5
    assert curve.recovered.value == pytest.approx((0.5 - 1 / 3) / (1 - 1 / 3))


def test_an_unknown_grade_names_the_known_ones():
    rows = [comparison("ab", (0, 1), correct=(1, 0))]
    with pytest.raises(ConfigError, match=r"\['correct'\].* Did you mean 'correct'"):
        best_of_n(scored(rows, [[1, 0]]), gold="corect")


def test_equal_grades_leave_nothing_to_recover():
    rows = [comparison("ab", (0, 0), correct=(1, 1))]
    assert best_of_n(scored(rows, [[1, 0]]), gold="correct").recovered is None
