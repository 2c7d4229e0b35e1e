"""Single environments: `gym.make` of the three ids."""

import gymnasium as gym
import pytest
from gymnasium.error import ResetNeeded

from gym_rm import ConfigError
from tests.envs.environments import length_reward

each_id = pytest.mark.parametrize("env_id", ["RewardModel-v0", "RewardModelCandidates-v0", "RewardModelTokens-v0"])


@each_id
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_envs": 4}, "num_envs must not be set for a single environment, got 4"),
        ({"autoreset_mode": "NextStep"}, "autoreset_mode must not be set for a single environment"),
        ({"group_size": 2}, "group_size must not be set for a single environment, got 2"),
    ],
    ids=str,
)
def test_a_setting_of_vector_environments_raises_config_error(env_id, settings, message):
    with pytest.raises(ConfigError, match=message):
        gym.make(env_id, **settings)


@pytest.mark.parametrize("make", [gym.make, gym.make_vec])
@pytest.mark.parametrize(
    ("env_id", "typo", "option"),
    [
        ("RewardModel-v0", "num_env", "num_envs"),
        ("RewardModelCandidates-v0", "candidate", "candidates"),
        ("RewardModelTokens-v0", "max_new_token", "max_new_tokens"),
        ("RewardModelTokens-v0", "promts", "prompts"),
    ],
)
def test_the_error_for_a_typo_names_the_nearest_option(make, env_id, typo, option):
    with pytest.raises(ConfigError, match=f"{typo}: unknown setting. Did you mean '{option}'"):
        make(env_id, **{typo: 1})


@each_id
def test_an_id_with_a_module_imports_gym_rm_and_one_with_a_namespace_is_the_same_environment(env_id):
    for make in (gym.make, gym.make_vec):
        assert make(f"gym_rm:{env_id}", reward_model=length_reward).spec.id == env_id
        assert make(f"gym_rm/{env_id}", reward_model=length_reward).spec.id == f"gym_rm/{env_id}"


@each_id
def test_an_ended_episode_asks_for_a_plain_reset(env_id):
    options = {"candidates": ["a", "b"]} if env_id == "RewardModelCandidates-v0" else {}
    options |= {"max_new_tokens": 1} if env_id == "RewardModelTokens-v0" else {}
    env = gym.make(env_id, reward_model=length_reward, prompts=["hi"], disable_env_checker=True, **options)
    env.reset(seed=0)
    action = "a" if env_id == "RewardModel-v0" else 0
    assert env.step(action)[2]
    with pytest.raises(ResetNeeded, match=r"the episode has ended; call reset\(\) first"):
        env.step(action)
