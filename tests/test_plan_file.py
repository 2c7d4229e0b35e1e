import subprocess
import sys

import gymnasium as gym
import pytest

from gym_rm.errors import ConfigError
from gym_rm.plan_file import planned_scorer
from gym_rm.planning.planner import plan
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
        ({"max_num_batched_tokens": 1024}, "options.reward_models.rm.max_num_batched_tokens is 512"),
        ({"num_replicas": 2}, "options.reward_models.rm.num_replicas is 1"),
        ({"tensor_parallel_size": 2}, "options.reward_models.rm.tensor_parallel_size is 1"),
        ({"fsdp_size": 2}, "options.reward_models.rm.fsdp_size is 1"),
    ],
)
def test_what_exceeds_a_plan_names_its_line(scoring_plan, options, line):
    with pytest.raises(ConfigError) as error:
        planned_scorer(scoring_plan, None, options, conversations=8)
    assert line in str(error.value)
    assert "plan.json" in str(error.value)


def test_a_plan_of_sizes_alone_asks_for_the_model(scoring_plan):
    with pytest.raises(ConfigError, match="only sizes for rm"):
        planned_scorer(scoring_plan, None, {}, conversations=8)


def test_more_environments_than_conversations_exceed_a_plan(scoring_plan):
    with pytest.raises(ConfigError, match=r"num_envs=16 exceeds the plan: .*conversations is 8"):
        gym.make_vec("gym_rm:RewardModel-v0", num_envs=16, plan=str(scoring_plan))


def test_smaller_numbers_than_the_plan_are_taken(scoring_plan):
    _, options = planned_scorer(scoring_plan, "model", {"max_num_batched_tokens": 256}, conversations=4)
    assert options["max_num_batched_tokens"] == 256


def test_a_larger_dtype_exceeds_a_plan():
    found = plan({"cluster": {"gpu": "l4"}, "reward_models": {"rm": {"model": "Qwen/Qwen3-0.6B"}}})
    with pytest.raises(ConfigError, match="dtype is bfloat16"):
        planned_scorer(found, None, {"dtype": "float32"}, conversations=1)


def test_one_of_several_reward_models_is_named(tmp_path):
    models = {"a": {"model": "Qwen/Qwen3-0.6B"}, "b": {"model": "Qwen/Qwen3-8B"}}
    file = plan({"reward_models": models}).save(tmp_path / "two.json")
    with pytest.raises(ConfigError, match="2 reward models; name one"):
        planned_scorer(file, None, {}, conversations=1)
    assert planned_scorer(f"{file}#b", None, {}, conversations=1)[0] == "Qwen/Qwen3-8B"
    with pytest.raises(ConfigError, match="no reward model 'c'"):
        planned_scorer(f"{file}#c", None, {}, conversations=1)


def test_an_environment_loads_no_planner():
    code = (
        "import sys, gymnasium as gym, gym_rm\n"
        "gym.make_vec('RewardModel-v0', num_envs=2, reward_model=lambda rows: [0.0] * len(rows)).reset()\n"
        "assert not [name for name in sys.modules if name.startswith('gym_rm.planning')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
