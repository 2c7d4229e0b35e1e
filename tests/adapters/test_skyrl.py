import importlib.util
import math
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from gymnasium.error import ResetNeeded
from recording import RecordingScorer, chat, merged

from gym_rm import ConfigError, ScoringError


class Base:
    """Stand-in of the base class, with the methods that the environment calls."""

    def close(self):
        pass


@pytest.fixture
def make(import_adapter):
    """Function that makes environments with SkyRL-gym's registry, or on a stand-in if SkyRL-gym is not installed."""
    if importlib.util.find_spec("skyrl_gym") is None:
        adapter = import_adapter("skyrl", {"skyrl_gym.envs.base_text_env": {"BaseTextEnv": Base}})
        return lambda env_config, extras=None: adapter.RewardModelTextEnv(env_config, extras or {})
    import skyrl_gym

    name = f"reward_model_{uuid.uuid4().hex}"
    skyrl_gym.register(name, "gym_rm.adapters.skyrl:RewardModelTextEnv")
    return lambda env_config, extras=None: skyrl_gym.make(name, env_config=env_config, extras=extras or {})


def test_an_episode_of_one_turn(make, recorder):
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


def test_a_dialogue_continues_with_the_user_turns_of_the_extras(make, recorder):
    env = make({"reward_model": recorder}, {"user_turns": ["sure?", "really?"]})
    env.init(chat("2 + 2?"))
    assert env.step("four")["observations"] == [{"role": "user", "content": "sure?"}]
    assert not env.step("yes!")["done"]
    assert env.step("yes")["done"]
    assert recorder.calls[-1] == [chat("2 + 2?", "four", "sure?", "yes!", "really?", "yes")]
    assert env.get_metrics()["num_turns"] == 3.0


def test_a_reply_without_a_score_is_an_error_or_gets_the_fallback_reward(make):
    env = make({"reward_model": RecordingScorer()})
    env.init(chat("q"))
    with pytest.raises(ScoringError):
        env.step("FAIL")
    env = make({"reward_model": RecordingScorer(), "fallback_reward": -2.0})
    env.init(chat("q"))
    assert env.step("FAIL")["reward"] == -2.0
    assert env.get_metrics()["score_ok"] == 0.0


def test_environments_of_many_threads_are_scored_in_one_batch(make, recorder):
    scorer = merged(recorder, 32)

    def trajectory(length):
        env = make({"reward_model": scorer})
        env.init(chat("q"))
        return env.step("x" * length)["reward"]

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(trajectory, range(32))) == [length / 4 for length in range(32)]
    assert len(recorder.calls) == 1


def test_skyrls_aggregate_metrics_averages_the_metrics(make, recorder):
    pytest.importorskip("skyrl_gym", reason="SkyRL-gym is not installed")
    from gym_rm.adapters.skyrl import RewardModelTextEnv

    metrics = []
    for reply in ("a", "bbb"):
        env = make({"reward_model": recorder})
        env.init(chat("q"))
        env.step(reply)
        metrics.append(env.get_metrics())
    assert RewardModelTextEnv.aggregate_metrics(metrics) == {"num_turns": 1.0, "score_ok": 1.0, "num_tokens": 3.0}


def test_an_unknown_key_of_env_config_is_refused(make, recorder):
    with pytest.raises(ConfigError, match="unknown keys"):
        make({"reward_model": recorder, "modle": 1})


def test_a_step_before_init_is_refused(make, recorder):
    with pytest.raises(ResetNeeded, match=r"call init\(prompt\)"):
        make({"reward_model": recorder}).step("four")


def test_a_step_after_the_end_is_refused_and_not_scored(make, recorder):
    env = make({"reward_model": recorder})
    env.init(chat("2 + 2?"))
    env.step("four")
    with pytest.raises(ResetNeeded, match=r"call init\(prompt\)"):
        env.step("five")
    assert recorder.num_conversations == 1


@pytest.mark.parametrize(("of_config", "of_extras"), [(None, 2), (3, 2), (2, 3)])
def test_the_smaller_max_turns_of_env_config_and_extras_ends_a_dialogue(make, recorder, of_config, of_extras):
    config = {} if of_config is None else {"max_turns": of_config}
    env = make({"reward_model": recorder, **config}, {"user_turns": ["sure?"] * 4, "max_turns": of_extras})
    env.init(chat("2 + 2?"))
    assert [env.step(reply)["done"] for reply in ("four", "yes")] == [False, True]


@pytest.mark.parametrize("value", [math.nan, math.inf, "0", True])
def test_an_invalid_fallback_reward_is_an_error_of_the_constructor(make, recorder, value):
    with pytest.raises(ConfigError, match="fallback_reward must be"):
        make({"reward_model": recorder, "fallback_reward": value})


@pytest.mark.parametrize("value", [0, "2", True, 1.5])
def test_an_invalid_max_turns_in_the_extras_is_an_error_of_the_constructor(make, recorder, value):
    with pytest.raises(ConfigError, match=r"extras\['max_turns'\] must be an integer"):
        make({"reward_model": recorder}, {"max_turns": value})


# --- prompts for verifiers -----------------------------------------------------------------------------------------


@pytest.fixture
def reward_of(make):
    """Function that makes an environment and returns the reward of one reply in it."""

    def reward_of(reward_model, reply, extras=None, question="2 + 2?", **env_config):
        env = make({"reward_model": reward_model, **env_config}, extras)
        env.init(chat(question))
        return env.step(reply)["reward"]

    return reward_of


def test_the_ground_truth_and_the_extras_reach_a_verifier(reward_of, verifier):
    extras = {"reward_spec": {"method": "rule", "ground_truth": "4"}, "data_source": "sums"}
    assert reward_of(verifier, "It is 4.", extras) == 1.0
    assert reward_of(verifier, "It is 5.", extras) == 0.0
    prompt = verifier.prompts[0]
    assert (prompt.messages, prompt.answer, prompt.metadata) == (tuple(chat("2 + 2?")), "4", extras)


@pytest.mark.parametrize("extras", [None, {}, {"reward_spec": None}, {"reward_spec": {}}])
def test_extras_without_a_ground_truth_are_an_error_or_give_the_fallback_reward(reward_of, verifier, extras):
    with pytest.raises(ScoringError):
        reward_of(verifier, "4", extras)
    assert reward_of(verifier, "4", extras, fallback_reward=-2.0) == -2.0


def test_a_reward_spec_that_is_a_text_is_refused(reward_of, verifier):
    with pytest.raises(ConfigError, match=r"extras\['reward_spec'\] must be .* got str '4'"):
        reward_of(verifier, "4", {"reward_spec": "4"})
