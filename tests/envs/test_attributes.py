"""`call`, `get_attr` and `set_attr` of vector environments, compared with `SyncVectorEnv`."""

import gymnasium as gym
import pytest

from gym_rm import ConfigError
from gym_rm.envs.vector import RewardVectorEnv
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


def test_every_environment_has_its_own_generator():
    envs = make(2)
    envs.reset(seed=0)
    first, second = envs.get_attr("np_random")
    assert first is not second


@pytest.mark.parametrize("name", ["fallback_reward", "max_turns", "prompts", "falback", "group_size"])
def test_setting_an_attribute_without_effect_raises_config_error(name):
    for envs in (*both("RewardModelTokens-v0")[:1], make(2)):
        with pytest.raises(ConfigError, match=f"{name} is .* so it cannot be set; make a new environment"):
            envs.set_attr(name, 1)


class Curriculum(RewardVectorEnv):
    difficulty = 1


@pytest.mark.parametrize("values", [5, [5, 5], (5, 5)])
def test_an_attribute_of_a_subclass_can_be_set(values):
    envs = Curriculum(2, reward_model=length_reward, prompts=PROMPTS)
    envs.set_attr("difficulty", values)
    assert envs.get_attr("difficulty") == (5, 5)


def test_what_the_constructor_and_the_interface_set_cannot_be_set():
    for envs in (
        make(2),
        *both("RewardModelTokens-v0")[:1],
        *both("RewardModelCandidates-v0", candidates=["a", "b"])[:1],
    ):
        for name in {*vars(envs), *dir(type(envs))} - set(dir(object)):
            with pytest.raises(ConfigError, match=f"{name} is part of .* so it cannot be set"):
                envs.set_attr(name, None)


def test_a_read_only_attribute_of_a_subclass_raises_config_error():
    class Fixed(RewardVectorEnv):
        difficulty = property(lambda self: 1)

    with pytest.raises(ConfigError, match=r"difficulty of .* is read-only"):
        Fixed(2, reward_model=length_reward, prompts=PROMPTS).set_attr("difficulty", 2)


@pytest.mark.parametrize("values", [[5, 6], [5], (5, 5, 5)])
def test_values_must_be_equal_for_all_environments(values):
    envs = Curriculum(2, reward_model=length_reward, prompts=PROMPTS)
    with pytest.raises(ConfigError, match="equal for all 2 environments"):
        envs.set_attr("difficulty", values)
    assert envs.difficulty == 1


@pytest.mark.parametrize("name", ["reset", "step", "close", "close_extras", "commit"])
def test_methods_for_all_environments_must_be_called_directly(name):
    with pytest.raises(ConfigError, match=f"{name} must be called directly"):
        make(2).call(name)


def test_an_unknown_attribute_raises_attribute_error():
    with pytest.raises(AttributeError, match="colour"):
        make(2).get_attr("colour")
