"""Metrics of pairs: known numbers, undefined values, and what must not change them."""

import math

import numpy as np
import pytest
from hypothesis import strategies as st

from gym_rm.errors import ConfigError
from gym_rm.evaluation.pairs import calibration_error, length_correlation, pair_metrics

MARGINS = st.lists(st.floats(-300, 300), min_size=1, max_size=40)


def test_known_numbers_of_four_pairs():
    metrics = pair_metrics([3.0, 1.0, 0.0, 2.0], [1.0, 1.0, 2.0, 1.0])
    margins = [2.0, 0.0, -2.0, 1.0]
    assert metrics.num_pairs == 4
    assert (metrics.accuracy, metrics.ties) == (0.5, 0.25)
    assert metrics.loss == pytest.approx(sum(math.log1p(math.exp(-m)) for m in margins) / 4)
    assert metrics.margin_mean == pytest.approx(0.25)
    assert metrics.margin_p50 == pytest.approx(0.5)
    assert (metrics.rewards_chosen_mean, metrics.rewards_rejected_mean) == (1.5, 1.25)


def test_pairs_without_two_finite_rewards_are_counted_and_left_out():
    metrics = pair_metrics([1.0, math.nan, 2.0, math.inf], [0.0, 0.0, math.nan, math.inf])
    assert (metrics.num_pairs, metrics.num_failed, metrics.accuracy) == (1, 3, 1.0)


@pytest.mark.parametrize("rewards", [[], [math.nan]], ids=["no-pairs", "no-scored-pairs"])
def test_undefined_metrics_are_none(rewards):
    metrics = pair_metrics(rewards, rewards, chosen_tokens=rewards, rejected_tokens=rewards)
    values = [value for name, value in metrics.as_dict().items() if not name.startswith("num_")]
    assert values == [None] * len(values)


def test_calibration_error_of_two_bins_by_hand():
    # Three pairs with the stated probability 0.75 of which one is right, and one sure and right pair.
    margins = [math.log(3), -math.log(3), -math.log(3), 50.0]
    assert calibration_error(margins) == pytest.approx(3 / 4 * abs(1 / 3 - 0.75))


def test_length_correlation_is_pearson_after_the_mean_of_each_pair_is_removed():
    random = np.random.default_rng(1)
    rewards, tokens = random.normal(size=(2, 30)), random.integers(1, 50, size=(2, 30)).astype(float)
    centred = [(values - values.mean(axis=0)).ravel() for values in (rewards, tokens)]
    expected = np.corrcoef(*centred)[0, 1]
    assert length_correlation(rewards[0] - rewards[1], tokens[0] - tokens[1]) == pytest.approx(expected)


@pytest.mark.parametrize("tokens", [[5, 5], [0, 0]])
def test_length_correlation_of_equal_lengths_is_undefined(tokens):
    assert pair_metrics([1, 2], [0, 3], chosen_tokens=tokens, rejected_tokens=tokens).length_correlation is None


def test_columns_of_different_lengths_are_an_error():
    with pytest.raises(ConfigError, match=r"\[2, 1\]"):
        pair_metrics([1.0, 2.0], [1.0])


@pytest.mark.filterwarnings("error")
def test_large_rewards_overflow_without_a_warning():
    metrics = pair_metrics([1e308, 1e300, 5.0], [-1e308, 1.0, 1.0], chosen_tokens=[1, 2, 3], rejected_tokens=[2, 1, 1])
    assert metrics.num_failed == 1
    assert all(value is not None and math.isfinite(value) for value in metrics.as_dict().values())
