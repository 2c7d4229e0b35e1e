"""Seeds, the order of prompts, and partial resets."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded

from gym_rm import ConfigError
from tests.envs.environments import PROMPTS, each_mode, length_reward, make, one_turn, prompt_ids


def test_every_environment_gets_every_prompt_once_per_epoch():
    for order in prompt_ids(one_turn(4), 6, seed=0):
        assert sorted(order[:3]) == sorted(order[3:]) == ["p0", "p1", "p2"]


def test_environment_i_has_the_seed_plus_i():
    assert prompt_ids(one_turn(4), 6, seed=10)[2].tolist() == prompt_ids(one_turn(1), 6, seed=12)[0].tolist()
    assert (
        one_turn(3).reset(seed=[7, 8, 9])[1]["prompt_id"].tolist() == one_turn(3).reset(seed=7)[1]["prompt_id"].tolist()
    )


def test_np_random_seed_returns_the_seed_of_each_environment():
    envs = one_turn(3)
    assert len({*envs.np_random_seed}) == 3
    envs.reset(seed=4)
    assert envs.np_random_seed == (4, 5, 6)
    envs.reset(seed=[9, None, 2])
    assert envs.np_random_seed == (9, 5, 2)
    assert len(envs.np_random) == 3


@pytest.mark.parametrize("seed", [[1], [1, 2, 3], []])
def test_a_list_of_seeds_must_have_one_per_environment(seed):
    with pytest.raises(ValueError, match="seed must have one entry for each of the 2 environments"):
        one_turn(2).reset(seed=seed)


@pytest.mark.parametrize("seed", [1.5, "1", [1, 2.0], [None, "2"], {}.keys])
def test_a_seed_must_be_an_integer(seed):
    with pytest.raises(ConfigError, match="seed must be an integer, None, or a list of integers and None; got "):
        one_turn(2).reset(seed=seed)
    with pytest.raises(ConfigError, match="seed must be an integer"):
        gym.make("RewardModel-v0", reward_model=length_reward).reset(seed=1.5)


@each_mode
def test_a_partial_reset_restarts_only_its_rows(mode):
    envs = make(3, autoreset_mode=mode)
    before, _ = envs.reset(seed=0)
    after, infos = envs.reset(options={"reset_mask": np.array([False, True, False])})
    assert (after[0], after[2]) == (before[0], before[2])
    assert infos["_prompt_id"].tolist() == [False, True, False]


def test_the_first_reset_must_include_every_row():
    with pytest.raises(ResetNeeded, match="reset_mask must include every environment in the first reset"):
        make(2).reset(options={"reset_mask": np.array([True, False])})


def test_unknown_reset_options_raise_config_error():
    with pytest.raises(ConfigError, match=r"unknown reset options .'prompt'."):
        make(2).reset(options={"prompt": 3})


@pytest.mark.parametrize("rows", [np.array([0, 1]), [True, False], np.array([True]), np.array([1, 0])])
def test_the_rows_of_a_step_must_be_a_mask(rows):
    envs = make(2)
    envs.reset(seed=0)
    with pytest.raises((TypeError, ValueError), match="rows must"):
        envs.step(["a", "b"], rows=rows)


def test_a_single_environment_draws_prompts_from_the_generator_that_was_set():
    def prompts(env):
        return [env.reset()[1]["prompt_id"] for _ in range(8)]

    first, second = (gym.make("RewardModel-v0", reward_model=length_reward, prompts=PROMPTS) for _ in range(2))
    first.reset(seed=1)
    for env in (first, second):
        env.np_random = np.random.default_rng(7)
    assert prompts(first) == prompts(second)
    assert first.unwrapped.np_random_seed == -1
    first.np_random = np.random.default_rng(7)
    second.np_random = np.random.default_rng(8)
    assert prompts(first) != prompts(second)


def test_a_seed_replaces_the_generator_that_was_set():
    env = gym.make("RewardModel-v0", reward_model=length_reward, prompts=PROMPTS)
    env.np_random = generator = np.random.default_rng(7)
    assert env.unwrapped.np_random is generator
    env.reset(seed=3)
    assert env.unwrapped.np_random is not generator
    assert env.unwrapped.np_random_seed == 3


@pytest.mark.parametrize("options", [5, [], "", "prompt_indices", [("prompt_indices", [0])], {5: 1}])
def test_options_that_are_no_mapping_of_options_are_refused(options):
    with pytest.raises(ConfigError, match=r"options of reset must be a mapping|unknown reset options"):
        make(2).reset(options=options)


@pytest.mark.parametrize("seed", ["a", "12", b"12", 1.5, {0: 1, 1: 2}, {1, 2}, iter([1, 2]), [1, "a"]])
def test_a_seed_of_another_type_is_refused(seed):
    with pytest.raises(ConfigError, match="seed must be an integer, None, or a list"):
        make(2).reset(seed=seed)


def test_seeds_and_prompts_of_a_series_are_read_by_position():
    pandas = pytest.importorskip("pandas")
    envs = make(2, prompts=["a", "b", "c"])
    observations, _ = envs.reset(options={"prompt_indices": pandas.Series([2, 0], index=[1, 0])})
    assert [each[0]["content"] for each in observations] == ["c", "a"]
    envs.reset(seed=pandas.Series([7, 8], index=[1, 0]))
    assert envs.np_random_seed == (7, 8)
