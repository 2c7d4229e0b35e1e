"""NeMo RL from its source tree, `--tree nemo_rl=PATH`: its interface, its processor, its Ray actors, its advantages."""

import importlib
import importlib.resources
import sys
import typing
from unittest import mock

import pytest

pytest.importorskip("nemo_gym")  # its environment

import ray
import torch
import typing_extensions
from recording import RecordingScorer
from starlette.testclient import TestClient
from trainers.nemo_gym.collection import response
from transformers import AutoTokenizer

from gym_rm.adapters.nemo_gym import make_app
from gym_rm.adapters.nemo_rl import RewardModelEnvironment
from gym_rm.scores import ScoringError

RewardModelActor = ray.remote(RewardModelEnvironment)

@pytest.fixture(scope="module")
def nemo_rl(tree):
    """Return a function that imports a module of NeMo RL, without its logger, which needs four services."""
    logger = mock.MagicMock(LoggerConfig=typing_extensions.TypedDict("LoggerConfig", {}))
    with (
        mock.patch.object(sys, "path", [str(tree("nemo_rl")), *sys.path]),
        mock.patch.dict(sys.modules, {"nemo_rl.utils.logger": logger}),
        mock.patch.object(typing, "TypedDict", typing_extensions.TypedDict),  # as in its Python, 3.13
    ):
        yield lambda name: importlib.import_module(f"nemo_rl.{name}")


def letters(conversations):
    """A reply of several words has no score; the others have their number of letters."""
    return [None if " " in (text := turns[-1]["content"]) else float(len(text)) for turns in conversations]


def log(text, question="Say a word."):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": text}]


def test_a_step_returns_its_fields_in_its_order(nemo_rl):
    environment = RewardModelEnvironment({"reward_model": letters})
    result = environment.step([log("one"), log("three")], [])  # as in its test of its own environment
    assert result._fields == nemo_rl("environments.interfaces").EnvironmentReturn._fields
    assert result.rewards.tolist() == [3.0, 5.0]
    assert result.rewards.dtype is torch.float32


def test_prompts_of_its_processor_are_read_back(nemo_rl):
    policy, recorder = str(importlib.resources.files("gym_rm") / "assets" / "policy"), RecordingScorer()
    tokenizer = AutoTokenizer.from_pretrained(policy)
    task = nemo_rl("data.interfaces").TaskDataSpec(task_name="math")
    row = {"messages": [{"content": "How much is 2 + 2?"}, {"content": "4"}], "task_name": "math"}
    sample = nemo_rl("data.processors").math_hf_data_processor(row, task, tokenizer, 1000, 0)
    reply = {"role": "assistant", "content": "four" + tokenizer.eos_token}
    environment = RewardModelEnvironment({"reward_model": recorder, "policy_tokenizer": policy})
    environment.step([[*sample["message_log"], reply]], [sample["extra_env_info"]])
    assert recorder.calls == [[log("four", "How much is 2 + 2?")]]


@pytest.fixture(scope="module")
def actor(nemo_rl):
    """Return an environment that NeMo RL made: an actor of Ray."""
    utils, registry = nemo_rl("environments.utils"), nemo_rl("distributed.ray_actor_environment_registry")
    name = f"{__name__}.RewardModelActor"
    registry.ACTOR_ENVIRONMENT_REGISTRY[name] = nemo_rl("distributed.virtual_cluster").PY_EXECUTABLES.SYSTEM
    utils.register_env("gym_rm", name)
    ray.init(num_cpus=1, include_dashboard=False)
    yield utils.create_env("gym_rm", {"kind": "math", "enabled": True})
    ray.shutdown()


def test_its_rollouts_get_rewards_from_an_actor_that_it_made(nemo_rl, actor):
    batch = {"message_log": [log("42"), log("41")], "task_name": ["math"] * 2}
    batch["extra_env_info"] = [{"ground_truth": "42"}] * 2
    result = nemo_rl("experience.rollouts").calculate_rewards(batch, {"math": actor})
    assert result.rewards.tolist() == [1.0, 0.0]


def test_a_row_without_a_score_ends_the_step(nemo_rl, actor):
    batch = {"message_log": [log("42"), log("41")], "task_name": ["math"] * 2}
    batch["extra_env_info"] = [{"ground_truth": "42"}, {}]
    with pytest.raises(ScoringError, match="row 1: the row has no reference answer"):
        nemo_rl("experience.rollouts").calculate_rewards(batch, {"math": actor})


# --- advantages of a group with a masked row -----------------------------------------------------------------------


@pytest.fixture
def batch(nemo_rl):
    """Return a group of four whose last row NeMo Gym's server masked, as NeMo RL's batch has it."""
    row = {"responses_create_params": {"input": "Say a word."}}
    client = TestClient(make_app(letters, failed_rows="mask"), base_url="http://127.0.0.1")
    bodies = [row | {"response": response(text)} for text in ("a", "bbb", "cc", "two words")]
    results = [{"full_result": client.post("/verify", json=body).json()} for body in bodies]
    batch = {"mask_sample": nemo_rl("experience.rollouts")._extract_mask_sample_flags(results)}
    batch["total_reward"] = torch.tensor([result["full_result"]["reward"] for result in results])
    return batch | {"loss_multiplier": torch.ones(4)}


def test_the_baseline_of_the_others_is_theirs_where_the_mask_reaches_it(nemo_rl, batch):
    baseline_and_std = nemo_rl("algorithms.utils").calculate_baseline_and_std_per_prompt
    assert nemo_rl("algorithms.grpo")._apply_mask_sample_filter(batch) == 1
    rewards, valid = batch["total_reward"], batch["loss_multiplier"]
    assert valid.tolist() == [1, 1, 1, 0]
    prompts = torch.zeros(4, 1, dtype=torch.long)
    masked = baseline_and_std(prompts, rewards, valid)
    others = baseline_and_std(prompts[:3], rewards[:3], torch.ones(3))
    for with_failed, without in zip(masked, others, strict=True):
        torch.testing.assert_close(with_failed[:3], without)


def test_its_grpo_counts_a_masked_row_so_that_the_default_is_an_error(nemo_rl, batch):
    module = nemo_rl("algorithms.advantage_estimator")
    estimator = module.GRPOAdvantageEstimator(module.AdvEstimatorConfig(), None)
    rewards, prompts = batch["total_reward"], torch.zeros(4, 1, dtype=torch.long)
    counted = estimator.compute_advantage(prompts, rewards, torch.ones(4, 1))[:3]
    others = estimator.compute_advantage(prompts[:3], rewards[:3], torch.ones(3, 1))
    assert not torch.allclose(counted, others)
    client = TestClient(make_app(letters), base_url="http://127.0.0.1")
    failed = {"responses_create_params": {"input": "Say a word."}, "response": response("two words")}
    assert client.post("/verify", json=failed).status_code == 422
