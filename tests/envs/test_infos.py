import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import VectorEnv
from hypothesis import given
from hypothesis import strategies as st
from recording import rating_steps

from gym_rm import ConfigError, Scores, ScoringError
from gym_rm.envs.infos import StepScores, add_group, add_values, infos_of_row


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.sampled_from([np.int64, np.float64, np.bool_, object]))
def test_the_format_equals_gymnasiums(mask, dtype):
    rows, values = np.array(mask), np.arange(len(mask)).astype(dtype)
    ours = {}
    add_values(ours, "x", values[rows], np.flatnonzero(rows), len(mask))
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


def test_the_mask_of_nested_infos_covers_the_rows_of_every_value():
    group, infos = {}, {}
    add_values(group, "a", np.array([1.0]), [0], 3)
    add_values(group, "b", np.array([2.0]), [1], 3)
    add_group(infos, "parts", group)
    assert infos["_parts"].tolist() == [True, True, False]


def test_the_infos_of_one_row_are_a_plain_dict():
    infos, group = {}, {}
    add_values(group, "mean", np.array([1.5]), [0], 2)
    add_group(infos, "metrics", group)
    add_values(infos, "name", ["a", "b"], [0, 1], 2)
    assert infos_of_row(infos, 0) == {"metrics": {"mean": 1.5}, "name": "a"}
    assert infos_of_row(infos, 1) == {"name": "b"}


def test_scores_are_stored_at_their_rows():
    scores = Scores.from_rewards([1.0, 2.0], components={"h": np.ones(2, np.float32)})
    step = StepScores.of(scores, [3, 1], 4, None)
    assert step.rewards.tolist() == [0.0, 2.0, 0.0, 1.0]
    assert step.scored.tolist() == step.ok.tolist() == [False, True, False, True]
    assert step.rewards.dtype == np.float64


def test_a_missing_score_gets_the_fallback_or_raises_with_its_environment():
    scores = Scores.from_rewards([1.0, np.nan])
    step = StepScores.of(scores, [0, 2], 3, -3.0)
    assert step.rewards.tolist() == [1.0, 0.0, -3.0]
    assert step.ok.tolist() == [True, False, False]
    with pytest.raises(ScoringError, match="row 2: the reward is nan"):
        StepScores.of(scores, [0, 2], 3, None)


def test_infos_of_the_scorer_become_infos_of_the_environment():
    infos = {"verdict": np.array(["right", "wrong"], dtype=object), "steps": np.array([3, 4], dtype=np.int32)}
    found = {}
    StepScores.of(Scores.from_rewards([1.0, 0.0], infos=infos), [2, 0], 3, None).add_to(found, np.ones(3, dtype=bool))
    assert found["verdict"].tolist() == ["wrong", None, "right"]
    assert found["_verdict"].tolist() == [True, False, True]
    assert found["steps"].dtype == np.int64


def test_an_info_of_the_scorer_with_a_reserved_name_raises_config_error():
    scores = Scores.from_rewards([1.0], infos={"prompt_id": np.array(["x"], dtype=object)})
    with pytest.raises(ConfigError, match=r"infos\['prompt_id'\] of the scorer has a name that the environment uses"):
        StepScores.of(scores, [0], 1, None)


def test_steps_are_arrays_of_the_rows_that_were_scored_also_in_final_info():
    keywords = {"prompts": ["Why?"], "reward_model": rating_steps, "fallback_reward": 0.0}
    envs = gym.make_vec("RewardModel-v0", 3, autoreset_mode="SameStep", **keywords)
    envs.reset(seed=0)
    infos = envs.step(["One.\n\nTwo two.", "", "One."])[-1]["final_info"]
    assert infos["step_rewards"][0].tolist() == [0.4, 0.8]
    assert [None if each is None else each.tolist() for each in infos["step_ends"]] == [[4, 14], None, [4]]
    assert infos["_step_rewards"].tolist() == infos["_step_ends"].tolist() == [True, False, True]
    single = gym.make("RewardModel-v0", **keywords)
    single.reset(seed=0)
    assert single.step("One.\n\nTwo two.")[-1]["step_ends"].tolist() == [4, 14]
