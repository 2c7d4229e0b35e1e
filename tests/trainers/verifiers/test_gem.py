"""GEM's vector environments step the environment of its page."""

import pytest

gem = pytest.importorskip("gem")

import gym_rm
from tests.trainers.pages import QUESTION, REPLIES, fails, module_of_page, said


@pytest.fixture(scope="module", autouse=True)
def page(tmp_path_factory):
    return module_of_page("gem", tmp_path_factory.mktemp("page"))


def steps(reward_model, replies, **settings):
    settings.update(prompts=[QUESTION["content"]], reward_model=reward_model)
    envs = gem.make_vec(["gym_rm:reward-model"] * len(replies), vec_kwargs=[settings] * len(replies), async_mode=True)
    envs.reset()
    _, rewards, _, _, infos = envs.step(replies)
    return list(rewards), infos


def test_the_rewards_are_those_of_the_scorer():
    rewards, _ = steps(None, REPLIES)
    assert rewards == gym_rm.load_scorer().score(said(*REPLIES)).rewards.tolist()


def test_a_missing_score_raises():
    with pytest.raises(gym_rm.ScoringError, match="returned None"):
        steps(fails, REPLIES)
