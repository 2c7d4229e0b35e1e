"""Distributions of lengths: from quantiles, from measured values, and from settings with mistakes."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.errors import ConfigError
from gym_rm.planning.lengths import STEPS, constant, from_quantiles, parse_lengths

SHARES = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}


@st.composite
def quantiles(draw):
    names = [name for name in SHARES if name == "max" or draw(st.booleans())]
    lengths = sorted(draw(st.lists(st.integers(1, 10**6), min_size=len(names), max_size=len(names))))
    return dict(zip(names, lengths, strict=True))


@given(quantiles())
def test_lengths_from_quantiles_rise_and_their_mean_is_between_the_extremes(given_quantiles):
    lengths = from_quantiles("prompt_tokens", given_quantiles)
    assert all(low <= high for low, high in itertools.pairwise(lengths.values))
    assert lengths.values[0] <= lengths.mean <= lengths.maximum == given_quantiles["max"]
    assert lengths.values[0] >= 1


def test_quantiles_come_back_up_to_the_width_of_one_value():
    given_quantiles = {"min": 16, "p10": 50, "p50": 200, "p95": 900, "max": 2048}
    lengths = from_quantiles("prompt_tokens", given_quantiles)
    steepest = (2048 - 900) / 0.05 / STEPS  # tokens between two values
    for name, length in given_quantiles.items():
        assert lengths.quantile(SHARES[name]) == pytest.approx(length, abs=steepest), name


def test_a_number_is_a_distribution_of_one_length():
    assert parse_lengths("prompt_tokens", 512) == constant(512)
    assert parse_lengths("prompt_tokens", {"max": 512, "min": 512}).mean == 512


def test_the_longest_of_many_is_longer_than_the_longest_of_few():
    lengths = from_quantiles("reply_tokens", {"p50": 200, "p95": 900, "max": 2048})
    longest = [lengths.longest_of(count) for count in (1, 4, 64, 100_000)]
    assert longest == sorted(longest)
    assert longest[0] == pytest.approx(200, rel=0.03)
    assert longest[-1] == pytest.approx(2048, rel=0.01)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "reply_tokens must be a number of tokens from 1"),
        (-5, "got -5"),
        (True, "got bool True"),
        ("512", "got str '512'"),
        (None, "got None"),
        (math.nan, "got nan"),
        (math.inf, "got inf"),
        (10**30, "from 1 to 100,000,000"),
        ([200, 900], "quantiles such as"),
        ({}, "reply_tokens.max is missing"),
        ({"p50": 200}, "reply_tokens.max is missing"),
        ({"p50": 200, "max": 100}, r"reply_tokens.max \(100\) is less than reply_tokens.p50 \(200\)"),
        ({"P50": 200, "max": 400}, "reply_tokens.P50 is unknown"),
        ({"mean": 200, "max": 400}, "the mean follows from the quantiles"),
        ({"p50": "x", "max": 400}, "reply_tokens.p50 must be a number of tokens"),
        ({50: 200, "max": 400}, "reply_tokens.50 is unknown"),
    ],
)
def test_a_mistake_in_a_setting_gets_an_error_with_its_name(value, message):
    with pytest.raises(ConfigError, match=message):
        parse_lengths("reply_tokens", value)


def test_all_problems_are_listed_at_once():
    with pytest.raises(ConfigError) as error:
        parse_lengths("prompt_tokens", {"p95": math.nan, "p50": -1, "p9x": 3})
    for part in ("p95 must be", "p50 must be", "p9x is unknown", "max is missing"):
        assert part in str(error.value)
