import numpy as np
import pytest
from gymnasium.vector import VectorEnv
from hypothesis import given
from hypothesis import strategies as st

from gym_rm import Scores
from gym_rm.envs.infos import StepScores, add_group, add_values, infos_of_row, spread_scores


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.sampled_from([np.int64, np.float64, np.bool_, object]))
def test_the_layout_is_the_one_gymnasium_builds(mask, dtype):
    rows, values = np.array(mask), np.arange(len(mask)).astype(dtype)
    ours = {}
    add_values(ours, "x", values, rows)
    envs = VectorEnv()
    envs.num_envs = len(mask)
    expected = {}
    for row in np.flatnonzero(rows):
        value = str(values[row]) if dtype is object else values[row].item()
        expected = envs._add_info(expected, {"x": value}, row)
    assert ours.keys() == expected.keys()
    for name in ours:
        assert ours[name].dtype == expected[name].dtype
        assert [str(each) for each in ours[name]] == [str(each) for each in expected[name]]


def test_a_group_is_for_the_rows_of_any_of_its_values():
    group, infos = {}, {}
    add_values(group, "a", np.array([1.0, 2.0, 3.0]), np.array([True, False, False]))
    add_values(group, "b", np.array([1.0, 2.0, 3.0]), np.array([False, True, False]))
    add_group(infos, "parts", group)
    assert infos["_parts"].tolist() == [True, True, False]


def test_an_empty_group_is_absent():
    infos = {}
    add_group(infos, "parts", {})
    assert infos == {}


def test_one_row_is_a_plain_dict_again():
    infos, group = {}, {}
    add_values(group, "mean", np.array([1.5, 0.0]), np.array([True, False]))
    add_group(infos, "metrics", group)
    add_values(infos, "name", np.array(["a", "b"], dtype=object), np.array([True, True]))
    assert infos_of_row(infos, 0) == {"metrics": {"mean": 1.5}, "name": "a"}
    assert infos_of_row(infos, 1) == {"name": "b"}


def test_scores_spread_over_the_rows_they_are_for():
    scores = spread_scores(Scores.from_rewards([1.0, 2.0], heads={"h": np.ones(2, np.float32)}), [3, 1], 4)
    assert scores.rewards[[3, 1]].tolist() == [1.0, 2.0]
    assert np.isnan(scores.rewards[[0, 2]]).all()
    assert scores.failed_rows == ()
    step = StepScores.from_scores(scores, [3, 1], None)
    assert step.rewards.tolist() == [0.0, 2.0, 0.0, 1.0]
    assert step.scored.tolist() == step.ok.tolist() == [False, True, False, True]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_becomes_an_error(value):
    scores = Scores.from_rewards([1.0])
    scores.rewards[0] = value
    spread = spread_scores(scores, [1], 2)
    assert spread.errors == (None, f"the reward is {value}")
    assert StepScores.from_scores(spread, [1], -3.0).rewards.tolist() == [0.0, -3.0]
