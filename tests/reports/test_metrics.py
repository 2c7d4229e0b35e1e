import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.reports.metrics import correlation, mean_and_std

FINITE = st.floats(-1e6, 1e6)


@given(st.lists(FINITE, min_size=1, max_size=30), st.integers(0, 5))
def test_statistics_equal_numpy_without_missing_scores(rewards, failures):
    found = mean_and_std([*rewards, *[math.nan, math.inf] * failures])
    assert found == pytest.approx((np.mean(rewards), np.std(rewards)))


@pytest.mark.parametrize("rewards", [[], [math.nan, math.nan]])
def test_without_scores_the_statistics_are_none(rewards):
    assert mean_and_std(rewards) == (None, None)


@pytest.mark.parametrize("constant", [[0.1, 0.1, 0.1], [5.0]])
def test_the_correlation_of_a_constant_is_none(constant):
    assert correlation(np.array(constant), np.arange(len(constant), dtype=float)) is None


@given(st.lists(st.tuples(FINITE, FINITE), min_size=2, max_size=20))
def test_correlation_is_between_minus_one_and_one(pairs):
    x, y = np.array(pairs).T
    r = correlation(x, y)
    assert r is None or -1.0 <= r <= 1.0


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e150])
def test_correlation_does_not_depend_on_the_scale(scale):
    x, y = np.array([1.0, 2.0, 4.0]), np.array([2.0, 1.0, 5.0])
    assert correlation(x * scale, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
