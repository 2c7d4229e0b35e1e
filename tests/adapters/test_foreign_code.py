"""RL scripts without code for reward models learn in the registered environments."""

import json
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
from tasks import CANDIDATES, WINDOW, best_return, task_prompts

import gym_rm

SCRIPT = Path(__file__).parent / "cleanrl_style_ppo.py"


# Before Gymnasium 1.4, RecordEpisodeStatistics reports wrong returns in the mode SameStep.
RETURNS_ARE_RIGHT = tuple(map(int, gym.__version__.split(".")[:2])) >= (1, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("SameStep", marks=pytest.mark.skipif(not RETURNS_ARE_RIGHT, reason="needs gymnasium>=1.4")),
        "NextStep",
    ],
)
def test_a_cleanrl_style_script_learns(mode, embedded_scorer):
    prompts = task_prompts(CANDIDATES)[:2]  # this network cannot distinguish more prompts by their token ids
    rows = [{"messages": list(prompt.messages)} for prompt in prompts]
    settings = {"prompts": rows, "window": WINDOW, "autoreset_mode": mode}
    run = subprocess.run(
        [sys.executable, SCRIPT, CANDIDATES, "--import-module", "gym_rm", "--env-kwargs", json.dumps(settings)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    returns = [float(value) for value in re.findall(r"episodic_return=(\S+)", run.stdout)]
    best = best_return(CANDIDATES, embedded_scorer, prompts)
    assert returns[-1] - returns[0] > 0.8 * (best - returns[0]) > 1  # below the best return because of exploration


@pytest.mark.slow
def test_a_script_in_the_style_of_the_sb3_zoo_learns(tmp_path):
    sb3 = pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")
    from stable_baselines3.common.callbacks import EvalCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    scorer = gym_rm.load_scorer()
    kwargs = {"prompts": task_prompts(CANDIDATES), "window": WINDOW, "reward_model": scorer}
    hyperparameters = {"n_steps": 32, "batch_size": 64, "n_epochs": 4, "learning_rate": 1e-3, "ent_coef": 0.02}
    envs = make_vec_env(CANDIDATES, n_envs=8, seed=0, env_kwargs=kwargs, monitor_dir=str(tmp_path))
    evaluation = make_vec_env(CANDIDATES, n_envs=4, seed=1, env_kwargs=kwargs)
    model = sb3.PPO("MlpPolicy", envs, seed=0, **hyperparameters)
    first = evaluate_policy(model, evaluation, n_eval_episodes=16)[0]
    model.learn(6144, callback=EvalCallback(evaluation, eval_freq=256, verbose=0, best_model_save_path=str(tmp_path)))
    best = sb3.PPO.load(tmp_path / "best_model")
    learned = evaluate_policy(best, evaluation, n_eval_episodes=16)[0] - first
    assert learned >= 0.9 * (best_return(CANDIDATES, scorer) - first) > 1
