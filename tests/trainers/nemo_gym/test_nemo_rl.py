"""NeMo RL from its source tree, `--tree nemo_rl=PATH`: its interface, its recipe, its Ray actors, its advantages."""

import importlib
import importlib.resources
import sys
import typing
from unittest import mock

import pytest

pytest.importorskip("nemo_gym")  # its environment

import datasets
import ray
import torch
import typing_extensions
from omegaconf import OmegaConf
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


CONFIG = """
defaults: {recipe}
policy: {{model_name: {policy}}}
data:
  train: {{dataset_name: ResponseDataset, data_path: {rows}, split_validation_size: 0}}
  default: {{env_name: gym_rm, prompt_file: null, input_key: input, output_key: output}}
env:
  gym_rm: {{kind: math, policy_tokenizer: "${{policy.tokenizer.name}}"}}
"""


def test_its_recipe_with_a_section_of_ours_reads_the_prompts_of_its_processor(nemo_rl, tree, tmp_path, monkeypatch):
    policy, rows = str(importlib.resources.files("gym_rm") / "assets" / "policy"), tmp_path / "rows.jsonl"
    rows.write_text('{"input": "2 + 2?", "output": "4"}\n{"input": "3 + 3?", "output": "6"}\n')
    recipe, file = tree("nemo_rl") / "examples" / "configs" / "grpo_rm_1B.yaml", tmp_path / "config.yaml"
    file.write_text(CONFIG.format(recipe=recipe, policy=policy, rows=rows))
    nemo_rl("utils.config").register_omegaconf_resolvers()
    config = OmegaConf.to_container(nemo_rl("utils.config").load_config(str(file)), resolve=True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(
        nemo_rl("data.utils"), "create_env", lambda env_name, env_config: RewardModelEnvironment(env_config)
    )
    tokenizer = AutoTokenizer.from_pretrained(policy)
    data, _, environments, _ = nemo_rl("data.utils").setup_response_data(tokenizer, config["data"], config["env"])
    samples, (environment,) = [data[0], data[1]], environments.values()
    assert samples[0]["message_log"][0]["content"].startswith("<|im_start|>user")
    reply = {"role": "assistant", "content": "It is 4." + tokenizer.eos_token}
    logs = [[*sample["message_log"], reply] for sample in samples]
    assert environment.step(logs, [sample["extra_env_info"] for sample in samples]).rewards.tolist() == [1.0, 0.0]


@pytest.fixture(scope="module")
def actor(nemo_rl):
    """Return an environment that NeMo RL made: an actor of Ray."""
    utils, registry = nemo_rl("environments.utils"), nemo_rl("distributed.ray_actor_environment_registry")
    name = f"{__name__}.RewardModelActor"
    registry.ACTOR_ENVIRONMENT_REGISTRY[name] = nemo_rl("distributed.virtual_cluster").PY_EXECUTABLES.SYSTEM
    utils.register_env("gym_rm", name)
    ray.init("local", num_cpus=1, include_dashboard=False)
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
