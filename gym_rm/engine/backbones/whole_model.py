"""The whole model of tensor-parallel ranks, one layer at a time, to compare with.

The trial at load compares layouts of the divided model with each other. An architecture whose tensor-parallel plan is
wrong would pass it, and its scores would be wrong. So the divided model is first compared with the undivided one: its
architecture again, whose layers gather their weights from the ranks before they run, and free them after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gym_rm.engine.backbones.sharded import Part, WholeWeights, layer_of


@torch.inference_mode()
def difference_to_whole(model: PreTrainedModel, input_ids: Tensor) -> float:
    """Return the largest difference of last hidden states to those of the whole model, relative to the largest.

    All ranks must call this.

    Args:
        model: model whose weights are divided among ranks, on plain tensors.
        input_ids: int64 `[1, L]`.
    """
    expected = _whole_model(model).base_model(input_ids=input_ids, use_cache=False).last_hidden_state.float()
    got = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state.float()
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def _whole_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with the tensors that every rank has, and whose other weights are gathered when needed."""
    with torch.device("meta"):
        whole: PreTrainedModel = type(model)(model.config)
    whole.eval()
    parts: dict[str, Part] = vars(model)["parts"]
    layers: dict[str, list[tuple[nn.Module, str, Callable[[Tensor], Tensor]]]] = {}
    for name, module in whole.named_modules():
        divided = model.get_submodule(name)
        module._buffers.update(divided._buffers)
        for last in module._parameters:
            part, local = parts.get(f"{name}.{last}"), divided._parameters[last]
            if isinstance(local, DTensor):
                part, local = Part.of(local), nn.Parameter(local.to_local(), requires_grad=False)
            module._parameters[last] = local
            if part is None or local is None:
                continue
            if layer := layer_of(name):
                layers.setdefault(layer, []).append((module, last, part.whole))
            else:
                module._parameters[last] = nn.Parameter(part.whole(local), requires_grad=False)
    for layer, weights in layers.items():
        WholeWeights(weights).run_in(whole.get_submodule(layer))
    return whole
