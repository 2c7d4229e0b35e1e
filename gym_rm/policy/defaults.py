"""The numbers of a GRPO run where its settings have `null`, its prompts and its reward model."""

from __future__ import annotations

import time
from typing import Any

import torch

from gym_rm.data.prompts import load_prompts
from gym_rm.errors import ConfigError
from gym_rm.policy.grpo_settings import GRPOSettings
from gym_rm.scorer import Scorer, load_scorer
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
    placed = {"device", "device_map", "num_replicas", "tensor_parallel_size", "executor"} & options.keys()
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


def complete(settings: GRPOSettings) -> GRPOSettings:
    """Return the settings with every `null` replaced that has a default."""
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
