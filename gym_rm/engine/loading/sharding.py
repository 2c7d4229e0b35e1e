"""Divide a checkpoint among ranks: what can be divided, and how transformers reads each rank's part of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedConfig, PreTrainedModel

from gym_rm.engine.backbones.sharded import ROWS, with_wildcards
from gym_rm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sharding:
    """How many ranks hold a model together.

    Attributes:
        tensor_parallel_size: number of ranks that divide the heads and columns of every layer.
        fsdp_size: number of ranks that divide the weights, and gather those of a layer before it runs.
    """

    tensor_parallel_size: int = 1
    fsdp_size: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tensor_parallel_size * self.fsdp_size


def require_divisible(config: PreTrainedConfig, sharding: Sharding, source: str) -> None:
    """Raise ConfigError if tensor parallelism cannot divide the attention heads of a model.

    Each rank must have whole heads, and as many query heads for each of its key-value heads as the whole model.
    """
    size = sharding.tensor_parallel_size
    if size == 1:
        return
    config = config.get_text_config()
    if not getattr(config, "base_model_tp_plan", None):
        raise ConfigError(
            f"tensor_parallel_size={size}: transformers has no tensor-parallel plan for {source!r} (model_type "
            f"{config.model_type!r}); pass fsdp_size={size} to divide its weights, or num_replicas={size} if it fits "
            "on one device."
        )
    heads = {name: getattr(config, name, None) or size for name in ("num_attention_heads", "num_key_value_heads")}
    common = math.gcd(*heads.values())
    if common % size:
        possible = [divisor for divisor in range(1, common + 1) if common % divisor == 0]
        counts = ", ".join(f"{name}={number}" for name, number in heads.items())
        raise ConfigError(
            f"tensor_parallel_size={size} cannot divide the heads of {source!r} ({counts}); sizes that can: "
            f"{possible}. fsdp_size={size} divides any model."
        )


def distributed_arguments(model_class: Any, config: PreTrainedConfig, sharding: Sharding) -> dict[str, Any]:
    """Return the arguments by which `from_pretrained` reads only this rank's part of the weights.

    Raises:
        ConfigError: this version of transformers cannot.
    """
    try:
        from transformers.distributed import DistributedConfig
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer
    except ImportError as error:
        raise ConfigError(f"tensor_parallel_size and fsdp_size need transformers 5.17 or newer ({error}).") from error

    class Rows(TensorParallelLayer):  # type: ignore[misc]
        """Every rank reads some rows of a module's weights; its forward stays as it is."""

        def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
            weight = module._parameters.get(param)
            if weight is not None and weight.dim() > 1:
                placed = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
                module._parameters[param] = nn.Parameter(placed, requires_grad=False)

        def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
            return module

    ALL_PARALLEL_STYLES.register(ROWS, Rows())
    with torch.device("meta"):
        model = model_class.from_config(config) if hasattr(model_class, "from_config") else model_class(config)
    plan = _plan(model, gather=sharding.fsdp_size > 1)
    return {"distributed_config": DistributedConfig(tp_size=sharding.size, tp_plan=plan)}


def _plan(model: PreTrainedModel, *, gather: bool) -> dict[str, str]:
    """Return the style of each module, by name with `*` for numbers: the model's own plan, or rows of every weight."""
    vocabulary = model.config.get_text_config().vocab_size
    plan = dict.fromkeys(model.tp_plan, ROWS) if gather else dict(model.tp_plan)
    for name, module in model.named_modules():
        generic = with_wildcards(name)
        of_tokens = isinstance(module, nn.Embedding) and module.num_embeddings == vocabulary
        in_layer = gather and "*" in generic and bool(module._parameters)
        if of_tokens or module is model.get_output_embeddings() or in_layer:
            plan[generic] = ROWS
    return plan
