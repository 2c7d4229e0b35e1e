import importlib.util
from pathlib import Path

import gymnasium as gym
import pytest

from gym_rm.errors import ConfigError
from gym_rm.planning.follow import follow_scoring
from gym_rm.planning.planner import plan
from gym_rm.training.policy_defaults import follow_plan
from tests import tiny_models

SIZES = {"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2}
SIZES |= {"intermediate_size": 128, "num_attention_heads": 4}
WORK = {"num_prompts": 4, "group_size": 2, "prompt_tokens": 100, "reply_tokens": 24}


@pytest.fixture(scope="module")
def scoring_plan(tmp_path_factory):
    """A plan for a tiny reward model on the CPU, as a file."""
    folder = tmp_path_factory.mktemp("plan")
    request = {
        "cluster": {"gpu": "cpu"},
        "reward_models": {"rm": {"config": SIZES, "dtype": "float32", "max_num_batched_tokens": 512}},
        "workload": WORK,
    }
    return plan(request).save(folder / "plan.json")


@pytest.fixture(scope="module")
def grpo_plan(tmp_path_factory):
    """A plan for GRPO in one process, as a file."""
    folder = tmp_path_factory.mktemp("plan")
    part = {"config": SIZES, "dtype": "float32"}
    request = {
        "cluster": {"gpu": "cpu"},
        "policy": {**part, "gradient_checkpointing": False},
        "generation": {"engine": "transformers"},
        "reward_models": {"rm": part},
        "workload": WORK,
    }
    return plan(request).save(folder / "grpo.yaml")


def test_an_environment_takes_the_numbers_of_its_plan(scoring_plan, tmp_path):
    folder = str(tiny_models.save_reward_model(tmp_path))
    envs = gym.make_vec("gym_rm:RewardModel-v0", num_envs=8, plan=str(scoring_plan), reward_model=folder)
    try:
        assert envs.unwrapped.scorer.max_num_batched_tokens == 512
    finally:
        envs.close()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"max_num_batched_tokens": 1024}, "pools.0.components.0.max_num_batched_tokens is 512"),
        ({"num_replicas": 2}, "pools.0.components.0.num_replicas is 1"),
        ({"tensor_parallel_size": 2}, "pools.0.components.0.tensor_parallel_size is 1"),
        ({"fsdp_size": 2}, "pools.0.components.0.fsdp_size is 1"),
    ],
)
def test_what_exceeds_a_plan_names_its_line(scoring_plan, options, line):
    with pytest.raises(ConfigError) as error:
        follow_scoring(scoring_plan, None, options, conversations=8)
    assert line in str(error.value)
    assert "plan.json" in str(error.value)


def test_a_plan_of_sizes_alone_asks_for_the_model(scoring_plan):
    with pytest.raises(ConfigError, match="only sizes for rm"):
        follow_scoring(scoring_plan, None, {}, conversations=8)


def test_more_environments_than_conversations_exceed_a_plan(scoring_plan):
    with pytest.raises(ConfigError, match=r"num_envs=16 exceeds the plan: .*conversations is 8"):
        gym.make_vec("gym_rm:RewardModel-v0", num_envs=16, plan=str(scoring_plan))


def test_smaller_numbers_than_the_plan_are_taken(scoring_plan):
    _, options = follow_scoring(scoring_plan, "model", {"max_num_batched_tokens": 256}, conversations=4)
    assert options["max_num_batched_tokens"] == 256


def test_a_larger_dtype_exceeds_a_plan():
    found = plan({"cluster": {"gpu": "l4"}, "reward_models": {"rm": {"model": "Qwen/Qwen3-0.6B"}}})
    with pytest.raises(ConfigError, match="dtype is bfloat16"):
        follow_scoring(found, None, {"dtype": "float32"}, conversations=1)


def test_one_of_several_reward_models_is_named(tmp_path):
    models = {"a": {"model": "Qwen/Qwen3-0.6B"}, "b": {"model": "Qwen/Qwen3-8B"}}
    file = plan({"reward_models": models}).save(tmp_path / "two.json")
    with pytest.raises(ConfigError, match="2 reward models; name one"):
        follow_scoring(file, None, {}, conversations=1)
    assert follow_scoring(f"{file}#b", None, {}, conversations=1)[0] == "Qwen/Qwen3-8B"
    with pytest.raises(ConfigError, match="no reward model 'c'"):
        follow_scoring(f"{file}#c", None, {}, conversations=1)


@pytest.fixture(scope="module")
def grpo():
    path = Path(__file__).parents[2] / "agents" / "grpo.py"
    spec = importlib.util.spec_from_file_location("grpo_for_plan", path)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_agent_takes_sizes_of_batches_from_the_plan(grpo, grpo_plan):
    settings = grpo.load_config(grpo.GRPOSettings, None, [f"plan={grpo_plan}", "policy.model=p", "env.reward_model=r"])
    followed = follow_plan(settings)
    assert (followed.env.num_prompts, followed.env.group_size) == (4, 2)
    assert followed.sampling.max_new_tokens == 24
    assert followed.sampling.max_num_seqs <= 8
    assert followed.env.reward_model_kwargs["dtype"] == "float32"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("env.num_prompts=64", "num_prompts is 4"),
        ("sampling.max_new_tokens=100", "reply_tokens is 24"),
        ("optimizer.max_num_batched_tokens=999999", "max_num_batched_tokens is"),
        ("loss.kl_coef=0.1", "has none"),
    ],
)
def test_the_agent_refuses_what_exceeds_the_plan(grpo, grpo_plan, change, line):
    settings = grpo.load_config(grpo.GRPOSettings, None, [f"plan={grpo_plan}", change])
    with pytest.raises(ConfigError, match=line):
        follow_plan(settings)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("policy.dtype=bfloat16", "holds float32 weights"),
        ("policy.gradient_checkpointing=true", "keeps all activations"),
        ("generation.engine=vllm", "generates with the policy's own weights"),
    ],
)
def test_the_agent_refuses_a_plan_that_it_cannot_follow(grpo, tmp_path, change, text):
    part = {"config": SIZES, "dtype": "float32"}
    request = {
        "cluster": {"gpu": "l4"},
        "policy": {**part, "gradient_checkpointing": False},
        "generation": {"engine": "transformers"},
        "reward_models": {"rm": part},
        "workload": WORK,
    }
    file = plan(request, overrides=(change,)).save(tmp_path / "plan.json")
    settings = grpo.load_config(grpo.GRPOSettings, None, [f"plan={file}"])
    with pytest.raises(ConfigError, match=text):
        follow_plan(settings)
