"""The arguments for TRL, read by the installed TRL and accelerate."""

import shlex

import pytest

from gym_rm.errors import ConfigError
from gym_rm.lora_settings import LoRASettings
from gym_rm.planning.exports import flags
from tests.planning.exports.test_fields import base, changed
from tests.planning.plans import awake, component, gpus, plan_of, pool

trl = pytest.importorskip("trl")
from accelerate.commands import launch as commands  # noqa: E402
from transformers import HfArgumentParser  # noqa: E402
from trl.scripts.grpo import GRPOScriptArguments  # noqa: E402

SHARDED = plan_of([4], pool((component("policy", "policy", fsdp_size=4, sleeps=False),), gpus(0, 0, 4)))
ADAPTERS = plan_of(
    [1],
    pool((component("policy", "policy", sleeps=False, lora=LoRASettings(), optimizer="adamw_8bit"),), gpus(0, 0, 1)),
)
PLANS = [awake(1), awake(4), SHARDED, ADAPTERS]


def read(plan):
    """Return what TRL's script reads of the arguments: of the script, the trainer and the model."""
    words = shlex.split(" ".join(line for line in flags(plan, "trl").lines if line.startswith("--")))
    parser = HfArgumentParser([GRPOScriptArguments, trl.GRPOConfig, trl.ModelConfig])
    given = ["--dataset_name", "unused", "--output_dir", "unused", "--use_cpu", "true"]
    return parser.parse_args_into_dataclasses([*given, *words])


def test_trl_reads_all_arguments():
    for plan in PLANS:
        assert len(read(plan)) == 3
    _, config, model = read(ADAPTERS)
    assert (model.use_peft, model.lora_r, model.lora_alpha, model.lora_dropout) == (True, 16, 32, 0.0)
    assert (model.lora_target_modules, model.dtype) == ("all-linear", "bfloat16")
    assert config.optim == "adamw_bnb_8bit"


def test_trl_makes_the_batches_of_the_plan():
    script, config, _ = read(awake(1))
    assert (config.generation_batch_size, config.num_generations) == (512, 8)
    assert script.reward_funcs == ["rewards.reward0"]


@pytest.mark.parametrize(
    ("changes", "dtype", "mixed"),
    [
        ({"fsdp_size": 4}, "bfloat16", "bf16"),  # FSDP2 makes float32 weights of those that it trains
        ({"num_replicas": 4}, "float32", "bf16"),
        ({"fsdp_size": 4, "master_weights": False}, "bfloat16", "no"),
        ({"num_replicas": 4, "master_weights": False}, "bfloat16", "no"),
        ({"num_replicas": 4, "lora": LoRASettings()}, "bfloat16", "bf16"),
        ({"fsdp_size": 4, "dtype": "float32"}, "float32", "no"),
    ],
)
def test_trl_loads_weights_of_the_planned_size(changes, dtype, mixed):
    plan = plan_of([4], pool((component("policy", "policy", sleeps=False, **changes),), gpus(0, 0, 4)))
    _, config, model = read(plan)
    assert (model.dtype, config.bf16) == (dtype, mixed == "bf16")
    assert f"--mixed_precision {mixed}" in flags(plan, "trl").lines[0]


def test_accelerate_accepts_the_launch_line():
    for plan in PLANS:
        words = flags(plan, "trl").lines[0].split()[2:]
        parsed = commands.launch_command_parser().parse_args([*words, "script.py"])
        assert parsed.num_processes == plan.used_gpus


def test_trl_generates_with_the_weights_of_the_policy():
    plan = changed(base("gym-rm"), "reference", dtype="float32")  # all conversations of a process at a time, 64 of 512
    assert read(plan)[1].use_vllm is False
    assert "vllm" not in "".join(line for line in flags(plan, "trl").lines if "use_vllm" not in line)
    with pytest.raises(ConfigError, match=r"max_num_seqs=32, but it generates all .*; set generation.max_num_seqs=64"):
        flags(changed(plan, "generation", max_num_seqs=32), "trl")
