"""Length-controlled accuracy: what is left of a model at equal lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.data.comparisons import load_comparisons
from gym_rm.evaluation.bootstrap import Resampling
from gym_rm.evaluation.preferences import length_control, logistic_weights
from gym_rm.evaluation.scored import pair_table
from tests.cli.command import DATA, needs_data
from tests.evaluation.comparisons import by

FEW = Resampling(60, 0)


def control(margins, differences):
    margins, differences = np.asarray(margins, dtype=float), np.asarray(differences, dtype=float)
    return length_control(margins, differences, np.arange(margins.size), resampling=FEW)


def drawn(count, *, bias, accuracy=0.7, seed=0):
    """Return margins of +-1 and length differences; the log-odds of being right grow with the length by `bias`."""
    random = np.random.default_rng(seed)
    differences = random.normal(60, 100, count)
    length = np.tanh(differences / np.sqrt(np.mean(differences**2)))
    odds = np.log(accuracy / (1 - accuracy)) + bias * length
    return np.where(random.random(count) < 1 / (1 + np.exp(-odds)), 1.0, -1.0), differences


@pytest.mark.parametrize("bias", [-2.0, 0.0, 2.0])
def test_the_accuracy_at_equal_lengths_is_recovered(bias):
    margins, differences = drawn(20_000, bias=bias)
    found = control(margins, differences)
    assert found.accuracy.value == pytest.approx(0.7, abs=0.015)
    assert found.length_weight == pytest.approx(bias, abs=0.1)
    assert found.accuracy.low < 0.7 < found.accuracy.high
    assert (abs(np.mean(margins > 0) - 0.7) > 0.05) == (bias != 0)


def test_weights_of_a_single_column_are_the_log_odds():
    weights = logistic_weights(np.ones((4, 1)), np.array([1.0, 1.0, 1.0, 0.0]), np.full(4, 1e4))
    assert weights == pytest.approx([np.log(3)], abs=1e-4)


def test_drawing_a_row_twice_is_the_same_as_having_it_twice():
    margins, differences = drawn(50, bias=1.0)
    features = np.stack([np.ones(50), differences / 100], axis=1)
    counts = np.random.default_rng(1).integers(0, 3, 50)
    weighted = logistic_weights(features, margins > 0, counts.astype(float))
    repeated = logistic_weights(
        np.repeat(features, counts, axis=0), np.repeat(margins > 0, counts), np.ones(counts.sum())
    )
    assert weighted == pytest.approx(repeated)


@pytest.mark.parametrize("differences", [[], [0.0, 0.0]], ids=["no-pairs", "equal-lengths"])
def test_without_differences_of_length_it_is_undefined(differences):
    assert control(np.ones(len(differences)), differences) is None


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-2000, 2000)), min_size=1, max_size=20))
def test_it_is_a_probability_for_any_pairs(pairs):
    found = length_control(
        *(np.array(column, dtype=float) for column in zip(*pairs, strict=True)),
        np.arange(len(pairs)),
        resampling=Resampling(5, 0),
    )
    if found is not None:
        assert 0.0 <= found.accuracy.low <= found.accuracy.high <= 1.0
        assert np.isfinite([found.accuracy.value, found.length_weight, found.margin_beyond_length]).all()


@needs_data
def test_a_model_that_only_measures_length_is_a_coin_at_equal_lengths():
    rows = load_comparisons(DATA / "hh_harmless.jsonl.gz").comparisons
    for sign in (1, -1):
        pairs = pair_table(by(rows, lambda text, sign=sign: sign * len(text)))
        found = length_control(pairs.margins, pairs.length_differences, pairs.prompts, resampling=FEW)
        assert found.accuracy.low < 0.5 < found.accuracy.high
        assert found.accuracy.value == pytest.approx(0.5, abs=0.06)  # pairs of equal lengths are ties, which are wrong
        assert np.sign(found.length_weight) == sign
