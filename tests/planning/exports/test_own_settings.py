"""Settings of the package's own runs, read by the schemas of these runs."""

import dataclasses
from pathlib import Path

import pytest

from gym_rm.config import load_config
from gym_rm.documents import parse_yaml
from gym_rm.errors import ConfigError
from gym_rm.planning.exports import flags
from gym_rm.planning.planner import plan
from gym_rm.policy.grpo_settings import GRPOSettings
from gym_rm.training.reward_model_settings import RewardModelTraining
from tests.planning.plans import together

ROOT = Path(__file__).parents[3]
SMALL = "Qwen/Qwen3-0.6B"
GRPO = {
    "cluster": {"gpus_per_node": 4},
    "policy": {"model": SMALL, "num_gpus": 4, "lora": {"rank": 8, "alpha": 8}},
    "generation": {"engine": "transformers"},
    "reward_models": {"rm": {"model": SMALL, "quantization": "fp8"}},
    "pools": "together",
}


def test_a_plan_on_several_gpus_is_a_torchrun_of_the_agent():
    found = flags(plan(GRPO), "gym-rm")
    settings = load_config(GRPOSettings, parse_yaml(found.text))
    assert found.notes[0].startswith("torchrun --nproc-per-node 4 -m gym_rm grpo --config run.yaml")
    assert (settings.policy.lora.rank, settings.policy.lora.alpha, settings.policy.dtype) == (8, 8, "bfloat16")
    assert settings.env.reward_model_kwargs["quantization"] == "fp8"
    assert (settings.env.num_prompts, settings.env.group_size, settings.sampling.max_new_tokens) == (64, 8, 512)


@pytest.mark.parametrize("changes", [(), ("policy.dtype=float32", "policy.shared_prompts=true", "workload.epochs=3")])
def test_a_run_has_all_that_the_plan_says_of_the_policy(changes):
    found = plan(GRPO, overrides=changes)
    part = found.component("policy")
    settings = load_config(GRPOSettings, parse_yaml(flags(found, "gym-rm").text))
    assert (settings.policy.dtype, settings.policy.precision) == (part.dtype, "no")
    assert settings.policy.gradient_checkpointing == part.gradient_checkpointing
    assert settings.optimizer.max_num_batched_tokens == part.max_num_batched_tokens
    assert (settings.optimizer.tree, settings.optimizer.epochs) == (part.shared_prompts, found.epochs)
    assert (settings.env.sleep, settings.loss.measure_kl) == (found.component("rm").sleeps, False)


def test_the_fix_of_a_refusal_has_a_plan_that_is_a_run():
    request = ROOT / "configs" / "plan" / "h100_1x8.yaml"
    with pytest.raises(ConfigError, match=r"set generation.engine=transformers, and policy.lora.rank=16 if"):
        flags(plan(request), "gym-rm")
    found = plan(request, overrides=("generation.engine=transformers", "policy.lora.rank=16"))
    load_config(GRPOSettings, parse_yaml(flags(found, "gym-rm").text))


def test_a_reward_model_on_its_own_gpus_is_served_as_planned():
    own = {**GRPO, "reward_models": {"rm": {"model": SMALL, "dtype": "float32"}}, "pools": "apart"}
    found = flags(plan(own | {"policy": {"model": SMALL, "lora": {}, "num_gpus": 2}}), "gym-rm")
    assert parse_yaml(found.text)["env"]["reward_model"] == "http://127.0.0.1:5000"
    assert any(f"gym-rm serve {SMALL} --port 5000 --option dtype=float32" in note for note in found.notes)


def test_a_plan_of_reward_training_is_a_run_of_the_trainer():
    request = {"cluster": {"gpus_per_node": 2}, "reward_training": {"model": SMALL, "dtype": "float32"}}
    found = flags(plan(request), "gym-rm")
    settings = load_config(RewardModelTraining, parse_yaml(found.text))
    assert (settings.model.path, settings.batch.batch_size, settings.batch.precision) == (SMALL, 64, "no")
    assert "gym_rm train run.yaml data.train=" in found.notes[0]


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ("generation.engine=vllm", "generation.engine=transformers"),
        ("policy.optimizer=sgd", "set policy.optimizer=adamw"),
        ("policy.master_weights=false", "set policy.master_weights=true"),
        ("policy.dtype=float16", "policy.dtype=bfloat16"),
        ("workload.num_prompts=6", "6 prompts of a step do not divide among 4 processes"),
        ("critic={}", "no critic"),
    ],
)
def test_what_the_agent_cannot_do_names_the_setting(change, fix):
    with pytest.raises(ConfigError, match=fix):
        flags(plan(GRPO, overrides=(change,)), "gym-rm")


def test_a_plan_of_sizes_alone_asks_for_the_model():
    found = plan(GRPO)
    (pool,) = found.pools
    parts = tuple(dataclasses.replace(each, model="sizes of policy") for each in pool.components)
    with pytest.raises(ConfigError, match="only sizes for policy"):
        flags(dataclasses.replace(found, pools=(dataclasses.replace(pool, components=parts),)), "gym-rm")
    with pytest.raises(ConfigError, match=r"generation\.engine=transformers"):
        flags(together(), "gym-rm")
