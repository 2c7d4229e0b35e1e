import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from tasks import CANDIDATES, TOKENS, make_task

from gym_rm import ConfigError, load_scorer

sb3 = pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")

from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize

from gym_rm.adapters.sb3 import VecEnvBridge

each_view = pytest.mark.parametrize("env_id", [CANDIDATES, TOKENS])


@pytest.fixture(scope="module")
def scorer():
    return load_scorer()


def cart_pole(num_envs=3, mode=AutoresetMode.SAME_STEP):
    return gym.make_vec(
        "CartPole-v1", num_envs, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}, max_episode_steps=20
    )


# --- the bridge ----------------------------------------------------------------------------------------------------


def test_the_bridge_returns_the_same_steps_as_dummy_vec_env():
    ours = VecEnvBridge(cart_pole())
    theirs = DummyVecEnv([lambda: gym.make("CartPole-v1", max_episode_steps=20)] * 3)
    for envs in (ours, theirs):
        envs.seed(7)
    np.testing.assert_array_equal(ours.reset(), theirs.reset())
    generator = np.random.default_rng(0)
    num_ends = 0
    for _ in range(60):
        actions = generator.integers(0, 2, 3)
        our_step, their_step = ours.step(actions), theirs.step(actions)
        for found, expected in zip(our_step[:3], their_step[:3], strict=True):
            np.testing.assert_array_equal(found, expected)
            assert found.dtype == expected.dtype
        for found, expected in zip(our_step[3], their_step[3], strict=True):
            assert found.keys() == expected.keys()
            assert found["TimeLimit.truncated"] == expected["TimeLimit.truncated"]
            num_ends += "terminal_observation" in found
            np.testing.assert_array_equal(found.get("terminal_observation"), expected.get("terminal_observation"))
    assert num_ends > 6


def test_the_infos_of_an_ended_episode_are_those_of_its_last_step(recorder):
    prompts = [{"prompt": "2 + 2?", "prompt_id": "first"}, {"prompt": "3 + 3?", "prompt_id": "second"}]
    envs = VecEnvBridge(gym.make_vec(TOKENS, 2, reward_model=recorder, prompts=prompts, window=12))
    envs.seed(0)
    envs.reset()
    before = [info["prompt_id"] for info in envs.reset_infos]
    stop = envs.action_space.n - 1
    _, rewards, dones, infos = envs.step(np.array([0, stop]))
    assert dones.tolist() == [False, True]
    assert infos[1]["prompt_id"] == before[1]
    assert infos[1]["score_ok"] is True
    assert envs.reset_infos[1]["prompt_id"] != before[1]
    assert "terminal_observation" not in infos[0]
    assert rewards.dtype == np.float32


@each_view
def test_sb3s_check_env_passes_on_the_single_environments(env_id, recorder):
    check_env(gym.make(env_id, reward_model=recorder))


def test_get_attr_and_env_is_wrapped_answer_for_each_index(recorder):
    envs = VecEnvBridge(make_task(CANDIDATES, recorder, 3))
    assert envs.get_attr("num_actions") == [4, 4, 4]
    assert envs.get_attr("num_actions", 1) == [4]
    assert not envs.has_attr("no_such_thing")
    with pytest.raises(AttributeError):
        envs.get_attr("no_such_thing")
    assert envs.env_is_wrapped(gym.Wrapper) == [False] * 3
    envs.close()


def test_maskable_ppo_never_chooses_a_candidate_that_is_none(recorder):
    contrib = pytest.importorskip("sb3_contrib", reason="sb3-contrib is not installed")

    def propose(conversation):
        return ["yes", None, "no", None] if "2" in conversation[-1]["content"] else ["yes", "no", "why", "never"]

    settings = {"prompts": ["2 + 2?", "3 + 3?"], "candidates": propose, "window": 6}
    envs = VecMonitor(VecEnvBridge(gym.make_vec(CANDIDATES, 4, reward_model=recorder, **settings)))
    contrib.MaskablePPO("MlpPolicy", envs, n_steps=16, batch_size=32, seed=0).learn(128)  # such a choice raises
    assert len(envs.env_method("action_masks", indices=[1, 3])) == 2
    with pytest.raises(ConfigError, match="env_method cannot call 'render'"):
        envs.env_method("render")


@each_view
def test_recurrent_ppo_takes_the_sizes_of_the_window(env_id, recorder):
    contrib = pytest.importorskip("sb3_contrib", reason="sb3-contrib is not installed")
    envs = VecEnvBridge(make_task(env_id, recorder, 4))
    model = contrib.RecurrentPPO("MlpLstmPolicy", envs, n_steps=8, batch_size=32, seed=0).learn(32)
    assert model.num_timesteps == 32


def test_the_error_for_an_unsupported_environment_names_an_alternative(recorder):
    with pytest.raises(ConfigError, match="RewardModelCandidates-v0"):
        VecEnvBridge(gym.make_vec("RewardModel-v0", 2, reward_model=recorder))
    with pytest.raises(ConfigError, match="autoreset_mode='SameStep'"):
        VecEnvBridge(make_task(CANDIDATES, recorder, 2, autoreset_mode="NextStep"))
    with pytest.raises(ConfigError, match="vector environment"):
        VecEnvBridge(gym.make(CANDIDATES, reward_model=recorder))


def test_reset_options_are_refused(recorder):
    envs = VecEnvBridge(make_task(CANDIDATES, recorder, 2))
    envs.set_options({"reset_mask": None})
    with pytest.raises(ConfigError, match="reset options"):
        envs.reset()


# --- SB3's wrappers and evaluation ---------------------------------------------------------------------------------


def test_a_model_with_monitor_and_normalisation_is_saved_loaded_and_evaluated(scorer, tmp_path):
    envs = VecNormalize(VecMonitor(VecEnvBridge(make_task(CANDIDATES, scorer, 8))), norm_obs=False)
    model = sb3.PPO("MlpPolicy", envs, n_steps=8, batch_size=32, seed=0).learn(128)
    assert len(model.ep_info_buffer) == 100
    model.save(tmp_path / "model")
    envs.save(tmp_path / "normalisation")

    fresh = VecMonitor(VecEnvBridge(make_task(CANDIDATES, scorer, 1)))
    again = VecNormalize.load(tmp_path / "normalisation", fresh)
    again.training, again.norm_reward = False, False
    loaded = sb3.PPO.load(tmp_path / "model", env=again)
    fresh.seed(0)
    returns, lengths = evaluate_policy(loaded, again, n_eval_episodes=8, return_episode_rewards=True)
    fresh.seed(0)
    same, _ = evaluate_policy(model, VecMonitor(fresh), n_eval_episodes=8, return_episode_rewards=True)
    assert returns == same
    assert lengths == [1] * 8
