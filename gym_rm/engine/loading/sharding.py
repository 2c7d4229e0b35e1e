"""Tensor parallelism: which models can be divided, and how transformers reads each rank's part of the weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from gym_rm.engine.backbones.sharded import ROWS, with_wildcards
from gym_rm.errors import ConfigError


def require_divisible(config: PreTrainedConfig, size: int, source: str) -> None:
    """Raise ConfigError if `size` ranks cannot divide the attention heads of a model.

    Each rank must have whole heads, and as many query heads for each of its key-value heads as the whole model.
    """
    config = config.get_text_config()
    if not getattr(config, "base_model_tp_plan", None):
        raise ConfigError(
            f"tensor_parallel_size={size}: transformers has no tensor-parallel plan for {source!r} (model_type "
            f"{config.model_type!r}); pass device_map='auto' to spread it over devices, or num_replicas={size} if it "
            "fits on one."
        )
    heads = {name: getattr(config, name, None) or size for name in ("num_attention_heads", "num_key_value_heads")}
    common = math.gcd(*heads.values())
    if common % size:
        possible = [divisor for divisor in range(1, common + 1) if common % divisor == 0]
        counts = ", ".join(f"{name}={number}" for name, number in heads.items())
        raise ConfigError(
            f"tensor_parallel_size={size} cannot divide the heads of {source!r} ({counts}); sizes that can: {possible}."
        )


def distributed_arguments(model_class: Any, config: PreTrainedConfig, size: int) -> dict[str, Any]:
    """Return the arguments by which `from_pretrained` reads only this rank's part of the weights."""
    ALL_PARALLEL_STYLES.register(ROWS, _Rows())
    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan=_plan(_without_weights(model_class, config)))}


class _Rows(TensorParallelLayer):  # type: ignore[misc]
    """Every rank reads some rows of a module's weights; its forward stays as it is."""

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        weight = module._parameters.get(param)
        if weight is not None and weight.dim() > 1:
            placed = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
            module._parameters[param] = nn.Parameter(placed, requires_grad=False)

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        return module


def _plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the style of each module, by name with `*` for numbers: the plan of the model, and rows of tokens."""
    vocabulary = model.config.get_text_config().vocab_size
    plan = dict(model.tp_plan)
    for name, module in model.named_modules():
        of_tokens = isinstance(module, nn.Embedding) and module.num_embeddings == vocabulary
        if of_tokens or module is model.get_output_embeddings():
            plan[with_wildcards(name)] = ROWS
    return plan


def _without_weights(model_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        made = model_class.from_config(config) if hasattr(model_class, "from_config") else model_class(config)
    model: PreTrainedModel = made
    return model
