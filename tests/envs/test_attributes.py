"""`call`, `get_attr` and `set_attr` of vector environments, compared with `SyncVectorEnv`."""

import gymnasium as gym
import pytest

from gym_rm import ConfigError
from tests.envs.environments import PROMPTS, length_reward, make


def both(env_id="RewardModel-v0", **options):
    options = {"num_envs": 2, "reward_model": length_reward, "prompts": PROMPTS, **options}
    return gym.make_vec(env_id, **options), gym.make_vec(env_id, vectorization_mode="sync", **options)


@pytest.mark.parametrize("env_id", ["RewardModel-v0", "RewardModelTokens-v0"])
@pytest.mark.parametrize("name", ["observation_space", "action_space", "np_random_seed", "render_mode"])
def test_attributes_equal_those_of_sync_vector_env(env_id, name):
    native, sync = both(env_id, render_mode="ansi")
    for envs in (native, sync):
        envs.reset(seed=3)
    assert native.get_attr(name) == native.call(name) == sync.get_attr(name)


def test_the_result_of_a_method_equals_that_of_sync_vector_env():
    native, sync = both(render_mode="ansi", prompts=PROMPTS[4:])
    for envs in (native, sync):
        envs.reset(seed=3)
    found = [text.partition("\n")[2] for text in native.call("render")]
    assert found == [text.partition("\n")[2] for text in sync.call("render")]


@pytest.mark.parametrize("env_id", ["RewardModel-v0", "RewardModelTokens-v0"])
def test_setting_an_attribute_is_an_error(env_id):
    envs, _ = both(env_id)
    with pytest.raises(ConfigError, match=r"fallback_reward cannot be set for the environments of .* make a new"):
        envs.set_attr("fallback_reward", 1)


@pytest.mark.parametrize("name", ["reset", "step", "close", "close_extras", "commit"])
def test_methods_for_all_environments_must_be_called_directly(name):
    with pytest.raises(ConfigError, match=f"{name} must be called directly"):
        make(2).call(name)
