"""SkyRL's configuration makes the environment of its page."""

import pytest

skyrl_gym = pytest.importorskip("skyrl_gym")
config = pytest.importorskip("skyrl.train.config")
from omegaconf import OmegaConf

import gym_rm
from tests.trainers.pages import QUESTION, REPLIES, fails, module_of_page, said

SETTING = "skyrl_gym.reward_model.max_turns=2"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return module_of_page("skyrl", tmp_path_factory.mktemp("page"), languages=("python", "py"))


def step(env_config, reply, **extras):
    env = skyrl_gym.make("reward_model", env_config=env_config, extras=extras)
    env.init([QUESTION])
    return env.step(reply)


def test_the_rewards_are_those_of_the_scorer_with_settings_of_the_configuration(page):
    overrides = OmegaConf.from_cli(["env_class=reward_model", SETTING])
    environment = page.RewardModelEnvironment.from_dict_config(overrides)
    env_config = getattr(environment.skyrl_gym, environment.env_class)  # as SkyRL's generator reads it
    outputs = [step(env_config, reply, user_turns=["Are you sure?"]) for reply in REPLIES]
    expected = gym_rm.load_scorer().score(said(*REPLIES)).rewards.tolist()
    assert [output["reward"] for output in outputs] == expected
    assert [output["observations"] for output in outputs] == [[{"role": "user", "content": "Are you sure?"}]] * 4


def test_its_own_configuration_refuses_the_settings():
    with pytest.raises(ValueError, match=r"Invalid fields \{'reward_model'\} for SkyRLGymConfig"):
        config.EnvironmentConfig.from_dict_config(OmegaConf.from_cli([SETTING]))


def test_a_missing_score_raises(page):
    with pytest.raises(gym_rm.ScoringError, match="returned None"):
        step({"reward_model": fails}, "FAIL")
