import pytest
from recording import chat

gem = pytest.importorskip("gem", reason="GEM is not installed")

NAME = "gym_rm:reward-model"


@pytest.fixture(scope="module", autouse=True)
def registered():
    gem.register(NAME, "gym_rm.adapters.gem:RewardModelGemEnv")


def test_texts_in_and_texts_out(recorder):
    env = gem.make(NAME, reward_model=recorder, prompts=[{"prompt": "2 + 2?", "user_turns": ["sure?"]}])
    observation, info = env.reset(seed=3)
    assert observation == "2 + 2?"
    assert info["prompt_id"] == "0"
    observation, reward, terminated, truncated, info = env.step("four")
    assert (observation, reward, terminated, truncated) == ("sure?", 1.0, False, False)
    observation, reward, terminated, truncated, info = env.step("yes")
    assert (observation, reward, terminated, truncated) == ("", 0.75, True, False)
    assert recorder.calls[-1] == [chat("2 + 2?", "four", "sure?", "yes")]
    assert isinstance(env.sample_random_action(), str)


def test_gems_vector_environment(recorder):
    envs = gem.make_vec([NAME] * 3, vec_kwargs=[{"reward_model": recorder, "prompts": ["2 + 2?"]}] * 3)
    observations, _ = envs.reset(seed=0)
    assert list(observations) == ["2 + 2?"] * 3
    _, rewards, terminations, *_ = envs.step(["four", "4", "it is four"])
    assert list(rewards) == [1.0, 0.25, 2.5]
    assert all(terminations)
