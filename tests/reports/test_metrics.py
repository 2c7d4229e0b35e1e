import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.reports.metrics import correlation, reward_metrics

FINITE = st.floats(-1e6, 1e6)


@given(st.lists(FINITE, min_size=1, max_size=30))
def test_statistics_equal_numpy(rewards):
    metrics = reward_metrics(rewards)
    assert (metrics.num_samples, metrics.num_failed) == (len(rewards), 0)
    assert metrics.mean == pytest.approx(np.mean(rewards))
    assert metrics.std == pytest.approx(np.std(rewards))
    assert (metrics.min, metrics.max) == (min(rewards), max(rewards))


@given(st.lists(FINITE, min_size=1, max_size=30), st.integers(0, 5))
def test_missing_scores_are_left_out_of_the_statistics(rewards, failures):
    whole, broken = reward_metrics(rewards), reward_metrics([*rewards, *[math.nan, math.inf] * failures])
    assert broken.num_failed == 2 * failures
    assert (whole.mean, whole.std, whole.min, whole.max) == (broken.mean, broken.std, broken.min, broken.max)


@pytest.mark.parametrize("rewards", [[], [math.nan, math.nan]])
def test_without_scores_the_statistics_are_none(rewards):
    metrics = reward_metrics(rewards)
    assert metrics.num_samples == 0
    assert {metrics.mean, metrics.std, metrics.min, metrics.max} == {None}


def test_one_sample_has_standard_deviation_zero():
    assert reward_metrics([2.0]).std == 0.0


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
