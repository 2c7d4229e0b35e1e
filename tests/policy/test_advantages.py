"""Advantages, penalties of rewards and weights of tokens."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.errors import ConfigError
from gym_rm.policy import advantages as estimators
from gym_rm.policy.losses import token_weights

BY_GROUP = ["grpo", "dr_grpo", "rloo", "leave_one_out"]
EVERY = [*BY_GROUP, "gdpo"]
DIVIDED = ["grpo", "leave_one_out", "gdpo"]
floats = st.floats(-1e3, 1e3, width=32)
every_estimator = pytest.mark.parametrize("estimator", EVERY)


def advantages(rewards, groups, estimator="grpo", *, std_floor=1e-3, components=None, weights=None):
    """Return the advantages; `gdpo` gets two components that add up to the rewards, unless others are given."""
    rewards, groups = np.asarray(rewards, float), np.asarray(groups)
    if estimator == "gdpo" and components is None:
        components = {"first": np.floor(rewards), "second": rewards - np.floor(rewards)}
    return estimators.estimate_advantages(
        rewards, groups, estimator=estimator, std_floor=std_floor, components=components, component_weights=weights
    )


@st.composite
def batches(draw):
    """Draw rewards `[B]` and groups `[B]`, groups of any size in any order, some rows equal or failed."""
    reward = st.one_of(floats, st.sampled_from([0.0, 1.0, math.nan]))
    rows = draw(st.lists(st.tuples(reward, st.integers(0, 4)), min_size=1, max_size=20))
    rewards, groups = zip(*rows, strict=True)
    return np.array(rewards), np.array(groups)


def by_hand(rewards, estimator):
    """Compute the advantages of one group in plain Python."""
    n = len(rewards)
    mean = sum(rewards) / n
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (n - 1))
    others = [(sum(rewards) - r) / (n - 1) for r in rewards]
    return {
        "grpo": [(r - mean) / std for r in rewards],
        "dr_grpo": [r - mean for r in rewards],
        "rloo": [r - other for r, other in zip(rewards, others, strict=True)],
        "leave_one_out": [(r - other) / std for r, other in zip(rewards, others, strict=True)],
    }[estimator]


@pytest.mark.parametrize("estimator", BY_GROUP)
@settings(max_examples=30)
@given(st.lists(st.integers(-50, 50), min_size=2, max_size=8).filter(lambda rewards: len(set(rewards)) > 1))
def test_estimators_of_groups_equal_their_formulas(estimator, rewards):
    expected = by_hand(rewards, estimator)
    assert advantages(rewards, [3] * len(rewards), estimator, std_floor=1e-9) == pytest.approx(expected)


def test_gdpo_normalises_each_component_and_whitens_their_weighted_sum():
    right, format_ = [1, 0, 0, 1, 1, 1], [0.0, 0.2, 0.2, 0.2, 0.9, 0.1]
    groups = [0, 0, 0, 1, 1, 1]
    summed = [0.0] * 6
    for values, weight in ((right, 1.0), (format_, 0.5)):
        for rows in ([0, 1, 2], [3, 4, 5]):
            group = [values[row] for row in rows]
            if len(set(group)) > 1:
                for row, value in zip(rows, by_hand(group, "grpo"), strict=True):
                    summed[row] += weight * value
    std = math.sqrt(sum(value**2 for value in summed) / 5)
    parts = {"right": np.array(right, float), "format": np.array(format_)}
    result = advantages(np.zeros(6), groups, "gdpo", components=parts, weights={"format": 0.5})
    assert result == pytest.approx([value / std for value in summed])


@pytest.mark.parametrize("estimator", DIVIDED)
@pytest.mark.parametrize(("many", "odd"), [(0.35, 0.95), (-5.28, 3.1)])
def test_seven_equal_rewards_and_a_different_one_give_no_large_advantage(estimator, many, odd):
    result = advantages(np.float32([many] * 7 + [odd]), [0] * 8, estimator, components={"all": [many] * 7 + [odd]})
    factor = 8 / 7 if estimator == "leave_one_out" else 1
    assert result == pytest.approx([-0.353553 * factor] * 7 + [2.474874 * factor], abs=1e-5)


def test_gdpo_leaves_out_components_that_belong_to_the_prompts_of_other_groups():
    nan = np.nan
    groups = np.array([0, 0, 0, 1, 1, 1])
    parts = {
        "math": np.array([1.0, 0.0, 0.0, nan, nan, nan]),
        "style": np.array([nan, nan, nan, 0.2, 0.9, nan]),  # the last row has failed
    }
    rewards = np.array([1.0, 0.0, 0.0, 0.2, 0.9, nan])
    result = advantages(rewards, groups, "gdpo", components=parts)
    assert (np.sign(result) == [1, -1, -1, -1, 1, 0]).all()
    assert np.isfinite(result).all()
    whole = np.array(list(parts.values())).T
    assert estimators.zero_variance_groups(whole, groups).tolist() == []
    assert estimators.zero_variance_groups(np.where(np.isnan(whole), nan, 1.0), groups).tolist() == [0, 1]


@every_estimator
@settings(max_examples=30)
@given(batches(), st.randoms())
def test_permuting_rows_permutes_the_advantages_bit_for_bit(estimator, batch, random):
    rewards, groups = batch
    order = np.array(random.sample(range(len(rewards)), len(rewards)))
    permuted = advantages(rewards[order], groups[order], estimator)
    assert np.array_equal(advantages(rewards, groups, estimator)[order], permuted)


@every_estimator
@settings(max_examples=30)
@given(batches())
def test_rows_without_a_signal_get_exactly_zero(estimator, batch):
    rewards, groups = batch
    result = advantages(rewards, groups, estimator)
    assert np.isfinite(result).all()
    assert not result[~np.isfinite(rewards)].any()
    assert not result[np.isin(groups, estimators.zero_variance_groups(rewards, groups))].any()


@every_estimator
@settings(max_examples=30)
@given(batches())
def test_failed_rows_change_no_other_row(estimator, batch):
    rewards, groups = batch
    valid = np.isfinite(rewards)
    alone = advantages(rewards[valid], groups[valid], estimator)
    assert np.array_equal(advantages(rewards, groups, estimator)[valid], alone)
    if estimator != "gdpo":
        infinite = np.where(valid, rewards, np.inf)
        assert np.array_equal(advantages(infinite, groups, estimator), advantages(rewards, groups, estimator))


@pytest.mark.parametrize("estimator", BY_GROUP)
@settings(max_examples=30)
@given(batches())
def test_advantages_of_a_group_add_up_to_zero_and_keep_the_order_of_its_rewards(estimator, batch):
    rewards, groups = batch
    result = advantages(rewards, groups, estimator)
    for group in np.unique(groups):
        mine = np.flatnonzero((groups == group) & np.isfinite(rewards))
        assert abs(result[mine].sum()) < 1e-5 * max(1.0, np.abs(result).max())
        ordered = result[mine][np.argsort(rewards[mine], kind="stable")]
        assert (np.diff(ordered) >= -1e-12 * np.abs(result).max()).all()


@pytest.mark.parametrize("estimator", DIVIDED)
@pytest.mark.parametrize("noise", [1e-7, 1e-3, 1e-2])
def test_rewards_that_differ_by_less_than_the_floor_get_small_advantages(estimator, noise):
    rewards, groups = np.array([1, 1 + noise, 1, 1 - noise] * 8), np.repeat(np.arange(8), 4)
    parts = {"a": rewards, "b": rewards[::-1]}
    result = advantages(rewards, groups, estimator, std_floor=0.1, components=parts)
    assert 0 < np.abs(result).max() <= 13.4 * noise  # a third more for the others' mean in a group of four


def test_components_give_a_signal_where_their_sum_gives_none():
    parts = {"right": np.array([1.0, 0, 0]), "short": np.array([0.0, 1, 1])}
    assert estimators.zero_variance_groups(np.ones(3), np.zeros(3)).tolist() == [0]
    assert estimators.zero_variance_groups(np.stack(list(parts.values()), axis=1), np.zeros(3)).size == 0
    result = advantages(np.ones(3), np.zeros(3), "gdpo", components=parts, weights={"short": 0.5})
    assert result[0] > 0 > result[1] == result[2]


def test_zero_variance_groups_are_those_without_two_valid_rewards_that_differ():
    rewards = np.array([1, 1, 2, 1, 5, np.nan, 3, 4, np.inf])
    groups = np.array([0, 0, 7, 7, 2, 2, 3, 3, 3])
    assert estimators.zero_variance_groups(rewards, groups).tolist() == [0, 2]
    assert estimators.zero_variance_groups(np.array([]), np.array([])).tolist() == []


@every_estimator
def test_rewards_whose_squares_would_overflow_are_refused(estimator):
    with pytest.raises(ConfigError, match=r"within \+-1e\+30, got 1e\+300"):
        advantages([1e30, 0, -1e300], [0, 0, 0], estimator)
    assert np.isfinite(np.float32(advantages([1e30, 0, -1e30], [0, 0, 0], estimator))).all()


def test_unknown_components_are_refused():
    with pytest.raises(ConfigError, match="the scorer gives none"):
        advantages([1, 2], [0, 0], "gdpo", components={})
    with pytest.raises(ConfigError, match=r"unknown component 'brief', expected one of \['a'\]"):
        advantages([1, 2], [0, 0], "gdpo", components={"a": np.array([1.0, 2.0])}, weights={"brief": 1.0})


LENGTHS = {"lengths": np.array([10, 80, 90, 100, 100, 40])}


def test_the_overlong_penalty_rises_over_the_buffer_and_is_whole_for_completions_that_were_cut():
    finished = np.array([True, True, True, True, False, False])
    options = {"max_new_tokens": 100, "buffer": 20, "penalty": 2.0}
    result = estimators.overlong_penalty(np.zeros(6), LENGTHS["lengths"], finished, **options)
    assert result == pytest.approx([0, 0, -1, -2, -2, -2])


@pytest.mark.parametrize(
    ("normalisation", "expected"),
    [
        ("token_mean", [1 / 12, 0, 1 / 12]),
        ("sequence_mean", [1 / (2 * 4), 0, 1 / (2 * 8)]),
        ("constant_length", [1 / (2 * 10), 0, 1 / (2 * 10)]),
    ],
)
def test_filtered_completions_have_no_weight_and_count_in_no_mean(normalisation, expected):
    lengths, kept = np.array([4, 10, 8]), np.array([True, False, True])
    result = token_weights(lengths, kept, normalisation=normalisation, max_new_tokens=10)
    assert result == pytest.approx(expected)
    nothing = token_weights(lengths, np.zeros(3, bool), normalisation=normalisation, max_new_tokens=10)
    assert nothing.tolist() == [0, 0, 0]


# --- steps -----------------------------------------------------------------------------------------------------------


def of_steps(steps, groups, credit, estimator="grpo", std_floor=1e-3):
    arrays = [np.array(each, float) for each in steps]
    found = estimators.step_advantages(
        arrays, np.array(groups), credit=credit, estimator=estimator, std_floor=std_floor
    )
    assert [len(each) for each in found] == [len(each) for each in steps]
    return [each.tolist() for each in found]


def test_the_sum_of_steps_is_that_of_grpo_and_pays_for_more_steps():
    steps = [[0.9, 0.1], [0.5], [0.9, 0.9, 0.9]]
    flat = np.concatenate(steps)
    normalised = (flat - flat.mean()) / flat.std(ddof=1)  # section 4.1.3: of all steps of the group
    first, second, third = of_steps(steps, [0, 0, 0], "sum")
    assert first == pytest.approx([normalised[:2].sum(), normalised[1]])
    assert second == pytest.approx([normalised[2]])
    assert third == pytest.approx([normalised[3:].sum(), normalised[4:].sum(), normalised[5]])
    more = of_steps([[0.9, 0.1], [0.5], [0.9] * 6], [0, 0, 0], "sum")[2]
    assert more[0] > third[0]


def test_the_minimum_is_laid_on_the_steps_up_to_the_worst_one_and_never_pays_for_more():
    steps = [[0.9, 0.1, 0.9], [0.8, 0.8]]
    low, high = of_steps(steps, [0, 0], "min")
    whole = advantages([0.1, 0.8], [0, 0]).tolist()
    assert low == pytest.approx([whole[0], whole[0], 0.0], abs=1e-3)
    assert high == pytest.approx([whole[1], whole[1] / 2])
    longer = of_steps([steps[0], [0.8, 0.8, 0.95, 0.95]], [0, 0], "min")[1]
    assert longer[0] == pytest.approx(whole[1])
    assert of_steps(steps, [0, 0], "last") == [pytest.approx([2**-0.5] * 3), pytest.approx([-(2**-0.5)] * 2)]


@pytest.mark.parametrize("credit", ["min", "sum", "last"])
@pytest.mark.parametrize("estimator", BY_GROUP)
def test_flat_steps_a_group_of_one_and_replies_without_steps_have_no_advantage(credit, estimator):
    steps = [[0.5, 0.5], [0.5], [0.5] * 3, [0.1, 0.9], [np.nan, 0.1], [0.2], [], [0.7]]
    groups = [0, 0, 0, 1, 1, 2, 2, 2]
    found = of_steps(steps, groups, credit, estimator)
    assert all(each == [0.0] * len(each) for each in found[:5])
    assert found[5][0] < 0 < found[7][0]
