from pathlib import Path

import psutil
import pytest
from tasks import CANDIDATES, WINDOW, task_prompts

import gym_rm
from gym_rm import ConfigError

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("ray.rllib", reason="RLlib is not installed")

from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module import FlattenObservations
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from gym_rm.adapters.rllib import register
from gym_rm.server.serve import RewardServer
from gym_rm.server.service import CALIBRATION

PROMPTS = ["Which is the smallest, 10, 45 or 27?", "What is the highest of 33, 71 and 12?"]


def length(conversations):
    return [float(len(conversation[-1]["content"])) for conversation in conversations]


def raises(conversations):
    raise OSError("the scorer crashed")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            "local",  # not the cluster of another test
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=2 * 10**8,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}},  # lets actors import `recording`
        )
        yield
        ray.shutdown()
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=600)
    assert not alive


class Shared:
    """A server of a scorer, and the URL that runners get. It counts conversations, but not those that clients check."""

    def __init__(self):
        self.scorer, self.calls = gym_rm.load_scorer(), []
        self.server = RewardServer(self, port=0).start()
        self.url = self.server.url

    def score(self, conversations, prompts=None):
        known = [turns[0][1] for turns in CALIBRATION]
        count = sum(conversation[0]["content"] not in known for conversation in conversations)
        self.calls += [count] if count else []
        return self.scorer.score(conversations, prompts)


@pytest.fixture
def shared():
    shared = Shared()
    yield shared
    shared.server.close()


def algorithm(env_name, num_env_runners, env_config=None):
    """Make PPO as on the adapter's page: it waits for all samples, and errors of the runners are fatal."""
    config = (
        PPOConfig()
        .environment(env_name, env_config=env_config or {})
        .env_runners(
            num_env_runners=num_env_runners,
            num_envs_per_env_runner=8,
            gym_env_vectorize_mode="vector_entry_point",
            sample_timeout_s=None,
            env_to_module_connector=lambda env=None, spaces=None, device=None: FlattenObservations(),
        )
        .fault_tolerance(restart_failed_env_runners=False)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[32]))
        .training(train_batch_size_per_learner=256, minibatch_size=64, num_epochs=4, lr=3e-3)
        .debugging(seed=0)
    )
    return config.build_algo()


def train(env_name, *, num_env_runners, iterations):
    """Return the mean return of each iteration and the number of steps that the runners kept."""
    algo = algorithm(env_name, num_env_runners)
    try:
        results = [algo.train()["env_runners"] for _ in range(iterations)]
    finally:
        algo.stop()
    return [result["episode_return_mean"] for result in results], results[-1]["num_env_steps_sampled_lifetime"]


def registered(scorer, env_id=CANDIDATES, **settings):
    return register(env_id, reward_model=scorer, prompts=task_prompts(env_id), window=WINDOW, **settings)


# --- the environments ----------------------------------------------------------------------------------------------


def test_what_rllib_cannot_use_is_refused():
    with pytest.raises(ConfigError, match="autoreset_mode must be 'NextStep'"):
        register(CANDIDATES, autoreset_mode="SameStep")
    with pytest.raises(ConfigError, match="RewardModelCandidates-v0"):
        register("RewardModel-v0", reward_model=length, prompts=PROMPTS)


def test_the_error_of_an_invalid_env_config_names_the_setting():
    name = register(CANDIDATES, reward_model=length, prompts=PROMPTS, window=WINDOW)
    with pytest.raises(ConfigError, match="windw: unknown setting"):
        algorithm(name, num_env_runners=1, env_config={"windw": 8})


def test_training_ends_with_an_error_if_the_scorer_raises():
    name = register(CANDIDATES, reward_model=raises, prompts=PROMPTS, window=WINDOW)
    algo = algorithm(name, num_env_runners=1)
    with pytest.raises(ray.exceptions.RayError):
        algo.train()
    algo.stop()


def test_the_plain_id_scores_every_step_once_in_next_step_mode(shared, caplog):
    settings = {"reward_model": shared.url, "prompts": PROMPTS, "window": WINDOW, "autoreset_mode": "NextStep"}
    algo = algorithm(CANDIDATES, num_env_runners=0, env_config=settings)
    steps_kept = algo.train()["env_runners"]["num_env_steps_sampled_lifetime"]
    algo.stop()
    assert sum(shared.calls) == steps_kept
    assert "SAME_STEP" not in caplog.text


# --- learning ------------------------------------------------------------------------------------------------------


def test_runners_share_one_reward_model(shared):
    returns, steps_kept = train(registered(shared.url), num_env_runners=2, iterations=10)
    assert returns[-1] > returns[0] + 2
    assert sum(shared.calls) == steps_kept
    assert min(shared.calls) >= 8  # each runner scores 8 conversations per call
