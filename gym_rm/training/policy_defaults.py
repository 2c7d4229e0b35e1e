"""The numbers of a GRPO run where its settings have `null`: those of a plan, else those of the package."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from gym_rm.config import Config
from gym_rm.data.prompts import load_prompts
from gym_rm.errors import ConfigError
from gym_rm.planning.follow import follow_scoring, training_limits
from gym_rm.scorer import Scorer, load_scorer
from gym_rm.training.policy_settings import GRPOSettings
from gym_rm.types import Prompt

ROUNDING = {"float32": 2.0**-18, "float16": 2.0**-10, "bfloat16": 2.0**-7, "int8": 2.0**-6, "fp8": 2.0**-4}
"""Rounding error of a reward model's scores by the precision of its backbone, relative to the largest score."""


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
    placed = {"device", "device_map", "num_replicas", "tensor_parallel_size", "fsdp_size", "replicas"} & options.keys()
    local = settings.env.reward_model is None or (
        isinstance(settings.env.reward_model, str) and not settings.env.reward_model.startswith(("http:", "https:"))
    )
    if device.type == "cuda" and local and not placed and ":" not in str(settings.env.reward_model):
        options["device"] = str(device)
    try:
        scorer: Scorer = load_scorer(settings.env.reward_model, **options)
    except ConfigError as error:
        raise ConfigError(f"env.reward_model={settings.env.reward_model!r:.200}: {error}") from error
    if settings.env.sleep and not hasattr(scorer, "sleep"):
        raise ConfigError(f"env.sleep=true needs a reward model that can sleep; {type(scorer).__name__} cannot.")
    return scorer


def rounding_error(scorer: Scorer) -> float:
    """Return the rounding error of a scorer's rewards, relative to the largest; 0 if it names no precision."""
    provenance = getattr(scorer, "provenance", None)
    if provenance is None or provenance.dtype is None:
        return 0.0
    return ROUNDING.get(str(provenance.settings.get("quantization") or provenance.dtype), ROUNDING["bfloat16"])


def complete(settings: GRPOSettings) -> GRPOSettings:
    """Return the settings with every `null` replaced that has a default, after those of the plan.

    Raises:
        ConfigError: a setting exceeds the plan; the message names the plan's line.
    """
    settings = follow_plan(settings)
    embedded = settings.policy.model is None
    sampling, optimizer = settings.sampling, settings.optimizer
    return settings.model_copy(
        update={
            "output": settings.output or f"outputs/grpo-{time.strftime('%Y%m%d-%H%M%S')}",
            "threads": settings.threads or (1 if embedded else torch.get_num_threads()),
            "sampling": sampling.model_copy(
                update={"max_new_tokens": sampling.max_new_tokens or (24 if embedded else 512)}
            ),
            "optimizer": optimizer.model_copy(
                update={"learning_rate": optimizer.learning_rate or (5e-4 if embedded else 1e-6)}
            ),
        }
    )


def follow_plan(settings: GRPOSettings) -> GRPOSettings:
    """Return the settings with the plan's numbers where they have their defaults.

    Raises:
        ConfigError: a setting exceeds the plan; the message names the plan's line.
    """
    if settings.plan is None:
        return settings
    policy = settings.policy
    checkpointing = policy.gradient_checkpointing
    limits = training_limits(
        settings.plan,
        dtype=policy.dtype,
        gradient_checkpointing=checkpointing,
        num_processes=int(os.environ.get("WORLD_SIZE", 1)),
        fsdp=settings.optimizer.fsdp,
    )
    env, sampling, optimizer, lines = settings.env, settings.sampling, settings.optimizer, limits.lines

    def limited(group: Config, name: str, limit: int, line: str) -> dict[str, int]:
        value = getattr(group, name)
        if value is None or value == type(group).model_fields[name].default:
            return {name: limit}
        limits.require(name, value, limit, line)
        return {}

    env_sizes = limited(env, "num_prompts", lines.plan.num_prompts, lines.own("num_prompts"))
    env_sizes |= limited(env, "group_size", lines.plan.group_size, lines.own("group_size"))
    if settings.loss.kl_coef and not limits.reference and policy.lora is None:
        raise ConfigError(f"loss.kl_coef={settings.loss.kl_coef} needs a reference, and {lines.name} has none.")
    tokens = lines.of(lines.plan.component("policy"), "max_num_batched_tokens")
    seats = lines.of(lines.plan.component("generation"), "max_num_seqs")
    sizes = limited(sampling, "max_new_tokens", limits.max_new_tokens, lines.own("reply_tokens"))
    sizes |= limited(sampling, "max_num_seqs", limits.rollout_batch_size, seats)
    budget = limited(optimizer, "max_num_batched_tokens", limits.component.max_num_batched_tokens, tokens)
    reward_model, options = follow_scoring(settings.plan, env.reward_model, env.reward_model_kwargs, conversations=1)
    loss = settings.loss if limits.reference else settings.loss.model_copy(update={"measure_kl": False})
    return settings.model_copy(
        update={
            "loss": loss,
            "policy": policy.model_copy(update={"model": policy.model or limits.policy}),
            "sampling": sampling.model_copy(update=sizes),
            "optimizer": optimizer.model_copy(update=budget),
            "env": env.model_copy(update={"reward_model": reward_model, "reward_model_kwargs": options, **env_sizes}),
        }
    )
