import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from recording import RecordingScorer, chat

from gym_rm import ConfigError, ScoringError

skyrl_gym = pytest.importorskip("skyrl_gym", reason="SkyRL-gym is not installed")

from gym_rm.adapters.skyrl import RewardModelTextEnv


@pytest.fixture
def make():
    """Environments made by SkyRL-gym's registry."""
    name = f"reward_model_{uuid.uuid4().hex}"
    skyrl_gym.register(name, "gym_rm.adapters.skyrl:RewardModelTextEnv")
    return lambda env_config, extras=None: skyrl_gym.make(name, env_config=env_config, extras=extras or {})


def test_one_turn(make, recorder):
    env = make({"reward_model": recorder})
    observations, metadata = env.init(chat("2 + 2?"))
    assert (observations, metadata) == (chat("2 + 2?"), {})
    output = env.step("four")
    assert output == {
        "observations": [],
        "reward": 1.0,
        "done": True,
        "metadata": {"num_turns": 1.0, "score_ok": 1.0, "num_tokens": 10.0},
    }
    assert recorder.calls == [[chat("2 + 2?", "four")]]
    env.close()


def test_a_dialogue_goes_on_with_the_rows_user_turns(make, recorder):
    env = make({"reward_model": recorder}, {"user_turns": ["sure?", "really?"]})
    env.init(chat("2 + 2?"))
    assert env.step("four")["observations"] == [{"role": "user", "content": "sure?"}]
    assert not env.step("yes!")["done"]
    assert env.step("yes")["done"]
    assert recorder.calls[-1] == [chat("2 + 2?", "four", "sure?", "yes!", "really?", "yes")]
    assert env.get_metrics()["num_turns"] == 3.0


def test_turns_can_be_limited(make, recorder):
    env = make({"reward_model": recorder, "max_turns": 1}, {"user_turns": ["sure?"]})
    env.init(chat("2 + 2?"))
    assert env.step("four")["done"]


def test_what_cannot_be_scored_is_never_a_zero(make):
    env = make({"reward_model": RecordingScorer()})
    env.init(chat("q"))
    with pytest.raises(ScoringError):
        env.step("FAIL")
    env = make({"reward_model": RecordingScorer(), "fallback_reward": -2.0})
    env.init(chat("q"))
    assert env.step("FAIL")["reward"] == -2.0
    assert env.get_metrics()["score_ok"] == 0.0


def test_environments_of_many_threads_are_scored_together(make):
    scorer = RecordingScorer(seconds=0.05)

    def trajectory(length):
        env = make({"reward_model": scorer})
        env.init(chat("q"))
        return env.step("x" * length)["reward"]

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(trajectory, range(32))) == [length / 4 for length in range(32)]
    assert len(scorer.calls) <= 6


def test_metrics_are_averaged_as_skyrl_does(make, recorder):
    metrics = []
    for reply in ("a", "bbb"):
        env = make({"reward_model": recorder})
        env.init(chat("q"))
        env.step(reply)
        metrics.append(env.get_metrics())
    assert RewardModelTextEnv.aggregate_metrics(metrics) == {"num_turns": 1.0, "score_ok": 1.0, "num_tokens": 3.0}


def test_mistakes_are_told(make, recorder):
    with pytest.raises(ConfigError, match="unknown keys"):
        make({"reward_model": recorder, "modle": 1})
    with pytest.raises(ConfigError, match="init"):
        make({"reward_model": recorder}).step("four")
