"""The numbers of a GRPO run where its settings have `null`: those of a plan, else those of the package."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from gym_rm.config import Config
from gym_rm.data.prompts import load_prompts
from gym_rm.errors import ConfigError
from gym_rm.lora_settings import LoRASettings
from gym_rm.plan_file import PlanFile, planned_model, planned_scorer, read_plan_file
from gym_rm.policy.grpo_settings import GRPOSettings
from gym_rm.policy.trained_policy import EMBEDDED
from gym_rm.scorer import Scorer
from gym_rm.scorers.load import load_scorer
from gym_rm.types import Prompt


def read_prompts(settings: GRPOSettings) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to train on and those to measure on."""
    prompts, options = list(load_prompts(settings.env.prompts)), settings.eval
    if options.prompts is not None:
        return prompts, list(load_prompts(options.prompts))[: options.num_prompts]
    count = min(options.num_prompts, len(prompts) // 4)
    return prompts[: len(prompts) - count], prompts[len(prompts) - count :]


def open_scorer(settings: GRPOSettings, device: torch.device) -> Scorer:
    """Return the reward model, on the device of this process unless its options say where it is.

    Raises:
        ConfigError: it cannot be loaded, or cannot sleep.
    """
    options: dict[str, Any] = dict(settings.env.reward_model_kwargs)
    placed = {"device", "device_map", "num_replicas", "tensor_parallel_size", "fsdp_size", "executor"} & options.keys()
    # A URL and `module:function` have a colon.
    named = settings.env.reward_model
    local = named is None or (isinstance(named, str) and ":" not in named.removeprefix("embedded:"))
    if device.type == "cuda" and local and not placed:
        options["device"] = str(device)
    try:
        scorer: Scorer = load_scorer(settings.env.reward_model, **options)
    except ConfigError as error:
        raise ConfigError(f"env.reward_model={settings.env.reward_model!r:.200}: {error}") from error
    if settings.env.sleep and not hasattr(scorer, "sleep"):
        raise ConfigError(f"env.sleep=true needs a reward model that can sleep; {type(scorer).__name__} cannot.")
    return scorer


def fill_defaults(settings: GRPOSettings) -> GRPOSettings:
    """Return the settings with every `null` replaced that has a default, after those of the plan.

    Raises:
        ConfigError: a setting exceeds the plan; the message names the plan's line.
    """
    settings = follow_plan(settings)
    embedded = settings.policy.model in (None, EMBEDDED)
    max_new_tokens = settings.sampling.max_new_tokens or (24 if embedded else 512)
    learning_rate = settings.optimizer.learning_rate or (5e-4 if embedded else 1e-6)
    return settings.model_copy(
        update={
            "output": settings.output or f"outputs/grpo-{time.strftime('%Y%m%d-%H%M%S')}",
            "threads": settings.threads or (1 if embedded else torch.get_num_threads()),
            "sampling": settings.sampling.model_copy(update={"max_new_tokens": max_new_tokens}),
            "optimizer": settings.optimizer.model_copy(update={"learning_rate": learning_rate}),
        }
    )


def follow_plan(settings: GRPOSettings) -> GRPOSettings:
    """Return the settings with the plan's numbers where they have their defaults.

    Raises:
        ConfigError: a setting exceeds the plan, or the plan is for another run; the message names the plan's line.
    """
    if settings.plan is None:
        return settings
    plan = read_plan_file(settings.plan)
    _require_same_run(plan, settings)
    env, policy, reference = settings.env, settings.policy, plan.get("reference") is not None
    adapters = policy.lora is not None or plan.get("policy", "lora")
    if settings.loss.kl_coef and not reference and not adapters:
        raise ConfigError(f"loss.kl_coef={settings.loss.kl_coef} needs a reference, and {plan.name} has none.")

    def limited(group: Config, **places: tuple[str, ...]) -> dict[str, Any]:
        """Return the plan's numbers for the settings of a group that are not set, after a check of those that are."""
        sizes = {}
        for name, place in places.items():
            value = getattr(group, name)
            if value is None or value == type(group).model_fields[name].default:
                sizes[name] = plan.get(*place)
            else:
                plan.limit(name, value, *place)
        return sizes

    env_sizes = limited(env, num_prompts=("num_prompts",), group_size=("group_size",))
    sizes = limited(settings.sampling, max_new_tokens=("reply_tokens",), max_num_seqs=("generation", "max_num_seqs"))
    budget = limited(settings.optimizer, max_num_batched_tokens=("policy", "max_num_batched_tokens"))
    reward_model, options = planned_scorer(settings.plan, env.reward_model, env.reward_model_kwargs, conversations=1)
    lora, planned = policy.lora, plan.get("policy", "lora")
    if planned and lora is None:
        lora = LoRASettings(**planned)
    elif planned and lora is not None:
        plan.limit("policy.lora.rank", lora.rank, "policy", "lora", "rank")
    loss = settings.loss if reference else settings.loss.model_copy(update={"measure_kl": False})
    return settings.model_copy(
        update={
            "loss": loss,
            "policy": policy.model_copy(update={"model": policy.model or planned_model(plan, "policy"), "lora": lora}),
            "sampling": settings.sampling.model_copy(update=sizes),
            "optimizer": settings.optimizer.model_copy(update=budget),
            "env": env.model_copy(update={"reward_model": reward_model, "reward_model_kwargs": options, **env_sizes}),
        }
    )


def _require_same_run(plan: PlanFile, settings: GRPOSettings) -> None:
    """Raise ConfigError if the plan is for other processes or another engine, or for other memory than the run takes.

    The agent trains and generates in the same processes, each on one GPU or CPU.
    """
    if plan.get("policy") is None or plan.get("generation") is None:
        raise ConfigError(f"{plan.name} has no policy; plan one: policy: {{model: ...}}.")
    processes, fsdp = int(os.environ.get("WORLD_SIZE", 1)), settings.optimizer.fsdp
    ours: dict[tuple[str, str], Any] = {
        ("policy", "num_replicas"): 1 if fsdp else processes,
        ("policy", "fsdp_size"): processes if fsdp else 1,
        ("policy", "tensor_parallel_size"): 1,
        ("policy", "dtype"): settings.policy.dtype,
        ("policy", "optimizer"): "adamw",
        ("policy", "master_weights"): True,
        ("policy", "gradient_checkpointing"): settings.policy.gradient_checkpointing,
        ("generation", "with_policy"): True,
        ("generation", "dtype"): settings.policy.dtype,
    }
    for place, value in ours.items():
        if plan.get(*place) != value:
            raise ConfigError(
                f"{plan.line(*place)}, but it is {value} in this run, which has {processes} processes (torchrun "
                "--nproc-per-node) and generates with the policy's own weights. Start it as planned, or plan it as it "
                "is (generation.engine=transformers)."
            )
