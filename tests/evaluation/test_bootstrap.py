"""Bootstrap intervals: whole groups are drawn, seeds repeat, and known sizes are met."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.evaluation import bootstrap
from gym_rm.evaluation.bootstrap import mean_intervals, wilson_interval


def interval_of(values, groups=None):
    values = np.asarray(values, dtype=float)
    groups = np.arange(values.size) if groups is None else np.asarray(groups)
    (interval,) = mean_intervals(values, np.ones((values.size, 1)), groups)
    return interval


@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_an_interval_contains_the_mean_and_stays_within_the_values(values):
    interval = interval_of(values)
    assert interval.value == pytest.approx(np.mean(values))
    assert min(values) <= interval.low <= interval.high <= max(values)


def test_the_width_of_a_share_is_that_of_the_binomial_distribution():
    interval = interval_of([1.0] * 300 + [0.0] * 100)
    half = 1.96 * math.sqrt(0.75 * 0.25 / 400)
    assert (interval.low, interval.high) == pytest.approx((0.75 - half, 0.75 + half), abs=0.005)


def test_pairs_of_one_prompt_are_drawn_together():
    """Ten copies of each value carry no more information than one."""
    values = np.random.default_rng(3).random(40)
    alone, tenfold = interval_of(values), interval_of(np.repeat(values, 10), np.repeat(np.arange(40), 10))
    assert (tenfold.low, tenfold.high) == pytest.approx((alone.low, alone.high))


def test_intervals_cover_the_truth_about_as_often_as_they_say(monkeypatch):
    monkeypatch.setattr(bootstrap, "RESAMPLES", 300)
    random = np.random.default_rng(4)
    covered = 0
    for _ in range(200):
        interval = interval_of(random.random(80) < 0.6)
        covered += interval.low <= 0.6 <= interval.high
    assert 0.88 <= covered / 200 <= 0.99


def test_a_column_without_rows_has_no_interval():
    masks = np.array([[1.0, 0.0], [1.0, 0.0]])
    found = mean_intervals(np.array([1.0, 0.0]), masks, np.array([0, 1]))
    assert found[0] is not None
    assert found[1] is None


def test_wilson_interval_of_a_textbook_case():
    # Newcombe 1998 (Statistics in Medicine 17, table I): 81 of 263.
    interval = wilson_interval(81 / 263, 263)
    assert (interval.low, interval.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
