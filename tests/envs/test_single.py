"""Single environments: `gym.make` of the three ids."""

import gymnasium as gym
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.wrappers import TimeLimit

from gym_rm import ConfigError
from gym_rm.errors import warn_once
from tests.envs.environments import length_reward, prompt

each_id = pytest.mark.parametrize("env_id", ["RewardModel-v0", "RewardModelCandidates-v0", "RewardModelTokens-v0"])


@pytest.fixture(autouse=True)
def _warn_again():
    warn_once.cache_clear()


@each_id
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_envs": 4}, "num_envs must not be set for a single environment, got 4"),
        ({"autoreset_mode": "NextStep"}, "autoreset_mode must not be set for a single environment"),
        ({"group_size": 2}, "group_size must be 1 for a single environment, got group_size=2"),
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
def test_an_id_with_a_module_imports_gym_rm(env_id):
    for make in (gym.make, gym.make_vec):
        assert make(f"gym_rm:{env_id}", reward_model=length_reward).spec.id == env_id


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


# --- replies that a TimeLimit cuts off ----------------------------------------------------------------------------


def cut(env, action, steps, limit=None):
    """Reset, take some steps, and reset again."""
    env = env if limit is None else TimeLimit(env, limit)
    env.reset(seed=0)
    for _ in range(steps):
        env.step(action)
    env.reset()


@pytest.mark.parametrize("limit", [None, 3])
def test_a_time_limit_that_cuts_replies_is_reported(caplog, limit):
    options = {"max_episode_steps": 3} if limit is None else {}
    cut(gym.make("RewardModelTokens-v0", reward_model=length_reward, prompts=["hi"], **options), 0, 3, limit)
    assert "its last reply was not scored" in caplog.text
    assert "max_new_tokens" in caplog.text


def test_a_time_limit_before_the_end_of_an_episode_that_is_scored_at_its_end_is_reported(caplog):
    rows = [prompt(0, "more?", "more?")]
    env = gym.make("RewardModel-v0", reward_model=length_reward, prompts=rows, reward_on="end", max_episode_steps=1)
    cut(env, "a", 1)
    assert "its last reply was not scored" in caplog.text


@pytest.mark.parametrize(("env_id", "steps"), [("RewardModelTokens-v0", 8), ("RewardModelTokens-v0", 0)])
def test_a_complete_reply_is_not_reported(caplog, env_id, steps):
    cut(gym.make(env_id, reward_model=length_reward, prompts=["hi"], max_episode_steps=8), 0, steps)
    assert not caplog.text


def test_an_episode_whose_replies_were_scored_is_not_reported(caplog):
    rows = [prompt(0, "more?", "more?")]
    cut(gym.make("RewardModel-v0", reward_model=length_reward, prompts=rows, max_episode_steps=1), "a", 1)
    assert not caplog.text
