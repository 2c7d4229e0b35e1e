"""Environments with a scorer of their own: Math-v0, Code-v0 and Mixed-v0."""

import json

import gymnasium as gym
import pytest

import gym_rm
from gym_rm.testing import check_vector_env

LENGTHS = {"length": "tests.envs.test_verified:length"}


def length(conversations):
    return [float(len(conversation[-1]["content"])) for conversation in conversations]


def mixed(num_envs=2, **settings):
    return gym.make_vec("Mixed-v0", num_envs=num_envs, **{"scorers": LENGTHS, "weights": {"length": 0.5}, **settings})


def test_options_of_the_scorer_and_of_the_environment_stand_side_by_side():
    envs = mixed(prompts=["a?", "b?"], max_turns=3)
    envs.reset(seed=0)
    _, rewards, *_ = envs.step(["four", "nine nine"])
    assert rewards.tolist() == [2.0, 4.5]
    assert envs.unwrapped.settings.max_turns == 3


def test_a_single_environment_gives_the_reward_of_the_vector_environment():
    env = gym.make("Mixed-v0", scorers=LENGTHS, weights={"length": 0.5}, prompts=["a?"])
    env.reset(seed=0)
    assert env.step("four")[1] == 2.0


def test_the_spec_of_an_environment_makes_it_again():
    envs = mixed(prompts=["a?"])
    spec = json.loads(json.dumps(envs.spec.kwargs))
    again = gym.make_vec(envs.spec.id, num_envs=2, **{key: value for key, value in spec.items() if key != "num_envs"})
    again.reset(seed=0)
    assert again.step(["four", "four"])[1].tolist() == [2.0, 2.0]


def test_the_vector_environments_follow_the_contract_of_gymnasium():
    check_vector_env(mixed(num_envs=4, prompts=["a?", "b?", "c?"]))


def test_an_unknown_keyword_names_the_nearest_one_of_both_kinds():
    with pytest.raises(gym_rm.ConfigError, match="Did you mean 'weights'"):
        mixed(weigths={"length": 1})
    with pytest.raises(gym_rm.ConfigError, match="Did you mean 'max_turns'"):
        mixed(max_turn=1)


@pytest.mark.parametrize("name", ["reward_model", "plan"])
def test_another_reward_model_is_refused(name):
    with pytest.raises(gym_rm.ConfigError, match=f"{name} must not be set for Mixed-v0"):
        mixed(**{name: "somewhere"})
