"""The arguments for TRL, read by the installed TRL and accelerate."""

import dataclasses

import pytest

from gym_rm.lora_settings import LoRASettings
from gym_rm.planning.exports import flags
from tests.planning.plans import awake, component, gpus, plan_of, pool

trl = pytest.importorskip("trl")
from accelerate.commands import launch as commands  # noqa: E402
from transformers import HfArgumentParser  # noqa: E402

SHARDED = plan_of([4], pool((component("policy", "policy", fsdp_size=4, sleeps=False),), gpus(0, 0, 4)))
ADAPTERS = plan_of(
    [1],
    pool((component("policy", "policy", sleeps=False, lora=LoRASettings(), optimizer="adamw_8bit"),), gpus(0, 0, 1)),
)
PLANS = [awake(1), awake(4), SHARDED, ADAPTERS]


def test_arguments_for_trl_are_fields_of_its_config_and_make_one():
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    fields |= {field.name for field in dataclasses.fields(trl.ModelConfig)} | {"reward_model_name_or_path"}
    for plan in PLANS:
        lines = [line for line in flags(plan, "trl").lines if line.startswith("--")]
        assert {line.split()[0].removeprefix("--") for line in lines} <= fields
    words = [word for line in flags(awake(1), "trl").lines[1:] for word in line.split(" ", 1)]
    config, _ = HfArgumentParser([trl.GRPOConfig]).parse_args_into_dataclasses(
        ["--output_dir", "unused", "--use_cpu", "true", *words], return_remaining_strings=True
    )
    assert (config.generation_batch_size, config.num_generations) == (512, 8)
    words = [word for line in flags(ADAPTERS, "trl").lines[1:] for word in line.split(" ", 1)]
    config, model, _ = HfArgumentParser([trl.GRPOConfig, trl.ModelConfig]).parse_args_into_dataclasses(
        ["--output_dir", "unused", "--use_cpu", "true", *words], return_remaining_strings=True
    )
    assert (model.use_peft, model.lora_r, model.lora_alpha, model.lora_target_modules) == (True, 16, 32, "all-linear")
    assert config.optim == "adamw_bnb_8bit"


def test_accelerate_accepts_the_launch_line():
    for plan in PLANS:
        words = flags(plan, "trl").lines[0].split()[2:]
        parsed = commands.launch_command_parser().parse_args([*words, "script.py"])
        assert parsed.num_processes == plan.used_gpus
