import json

import pytest
import yaml

from gym_rm.config import load_config
from gym_rm.errors import ConfigError
from gym_rm.planning.planner import plan
from gym_rm.policy.defaults import follow_plan
from gym_rm.policy.grpo_settings import GRPOSettings

SIZES = {"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2}
SIZES |= {"intermediate_size": 128, "num_attention_heads": 4}
WORK = {"num_prompts": 4, "group_size": 2, "prompt_tokens": 100, "reply_tokens": 24}


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


def test_the_agent_takes_sizes_of_batches_from_the_plan(grpo_plan):
    settings = load_config(GRPOSettings, None, [f"plan={grpo_plan}", "policy.model=p", "env.reward_model=r"])
    followed = follow_plan(settings)
    assert (followed.env.num_prompts, followed.env.group_size) == (4, 2)
    assert followed.sampling.max_new_tokens == 24
    assert followed.sampling.max_num_seqs <= 8
    assert followed.env.reward_model_kwargs["dtype"] == "float32"


def test_the_agent_trains_the_adapters_of_the_plan(grpo_plan, tmp_path):
    values = yaml.safe_load(grpo_plan.read_text(encoding="utf-8"))
    values["options"]["policy"]["lora"] = {"rank": 16}
    planned = ["policy.model=p", "env.reward_model=r"]
    (tmp_path / "plan.json").write_text(json.dumps(values), encoding="utf-8")
    settings = load_config(GRPOSettings, None, [f"plan={tmp_path}/plan.json", *planned])
    assert (follow_plan(settings).policy.lora.rank, follow_plan(settings).policy.lora.alpha) == (16, 32.0)
    settings = load_config(GRPOSettings, None, [f"plan={tmp_path}/plan.json", *planned, "policy.lora.rank=32"])
    with pytest.raises(ConfigError, match=r"policy\.lora\.rank=32 exceeds the plan"):
        follow_plan(settings)
    settings = load_config(GRPOSettings, None, [f"plan={grpo_plan}", *planned])
    assert follow_plan(settings).policy.lora is None


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("env.num_prompts=64", "num_prompts is 4"),
        ("sampling.max_new_tokens=100", "reply_tokens is 24"),
        ("optimizer.max_num_batched_tokens=999999", "max_num_batched_tokens is"),
        ("loss.kl_coef=0.1", "has none"),
    ],
)
def test_the_agent_refuses_what_exceeds_the_plan(grpo_plan, change, line):
    settings = load_config(GRPOSettings, None, [f"plan={grpo_plan}", change])
    with pytest.raises(ConfigError, match=line):
        follow_plan(settings)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("policy.dtype=bfloat16", "policy.dtype is bfloat16, but it is float32"),
        ("policy.optimizer=sgd", "policy.optimizer is sgd, but it is adamw"),
        ("policy.gradient_checkpointing=true", "policy.gradient_checkpointing is True, but it is False"),
        ("generation.engine=vllm", "generation.dtype is bfloat16, but it is float32"),
    ],
)
def test_the_agent_refuses_a_plan_that_it_cannot_follow(tmp_path, change, text):
    part = {"config": SIZES, "dtype": "float32"}
    request = {
        "cluster": {"gpu": "l4"},
        "policy": {**part, "gradient_checkpointing": False},
        "generation": {"engine": "transformers"},
        "reward_models": {"rm": part},
        "workload": WORK,
    }
    file = plan(request, overrides=(change,)).save(tmp_path / "plan.json")
    settings = load_config(GRPOSettings, None, [f"plan={file}"])
    with pytest.raises(ConfigError, match=text):
        follow_plan(settings)
