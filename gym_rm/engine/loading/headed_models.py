"""Heads of any name and shape, built from the tensors that a checkpoint holds beside its backbone.

Public reward models keep their heads under many names (`score`, `v_head.summary`, `regression_head`, ...). A head is
built from the shapes of its tensors, so that transformers can load both and report what is missing, and no code of the
checkpoint runs.
"""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from gym_rm.errors import ConfigError

Shapes = Mapping[str, tuple[int, ...]]
ACTIVATIONS = {"relu": nn.ReLU, "selu": nn.SELU, "tanh": nn.Tanh}


class GatingNetwork(nn.Module):
    """Weights of the objectives, from the hidden state at the end of the prompt.

    ArmoRM (arXiv 2406.12845, section 3.2) stacks linear layers, with ReLU between; QRM (arXiv 2409.10164) stores its
    batch norms too. Both end in `softmax(x / temperature) * logit_scale`.
    """

    def __init__(self, layers: nn.Sequential, temperature: float) -> None:
        super().__init__()
        self.layers = layers
        self.logit_scale = nn.Parameter(torch.ones(1))
        self.temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        """Weights `[R, H]` of hidden states `[R, hidden]`."""
        for layer, following in itertools.zip_longest(self.layers, list(self.layers)[1:]):
            x = layer(x)
            if isinstance(layer, nn.Linear) and isinstance(following, nn.Linear):
                x = torch.relu(x)
        return torch.softmax(x / self.temperature, dim=-1) * self.logit_scale


def headed_model(
    config: PreTrainedConfig, shapes: Shapes, *, backbone: str | None = None, activation: str = "relu"
) -> type[PreTrainedModel]:
    """A class of models with the backbone of a configuration and the heads of these shapes, for `from_pretrained`.

    Args:
        config: of the backbone; its architecture must be one of transformers' own.
        shapes: of every tensor beside the backbone, by its name in the checkpoint.
        backbone: prefix of the backbone's tensors; None for the usual one of its architecture.
        activation: between the linear layers of a head, which leave no trace in a checkpoint.

    Raises:
        ConfigError: tensors that do not belong to linear layers, batch norms or a gating network.
    """
    backbone_class = MODEL_MAPPING[type(config)]
    prefix = backbone or str(backbone_class.base_model_prefix)
    parent = next(c for c in backbone_class.__mro__[1:] if issubclass(c, PreTrainedModel))

    def __init__(self: Any, config: PreTrainedConfig) -> None:
        parent.__init__(self, config)
        setattr(self, prefix, backbone_class(config))
        for name, inner in _by_first_name(shapes).items():
            if "" in inner:
                self.register_parameter(name, nn.Parameter(torch.zeros(inner[""]), requires_grad=False))
            else:
                self.add_module(name, _build(inner, activation, config))
        self.post_init()

    attributes: dict[str, Any] = {
        "__init__": __init__,
        "__module__": __name__,
        "base_model_prefix": prefix,
        # Also what quantisation leaves alone.
        "_keep_in_fp32_modules_strict": sorted(_by_first_name(shapes)),
    }
    return type(f"{backbone_class.__name__}WithHeads", (parent,), attributes)


def outputs_of_heads(shapes: Shapes) -> dict[str, int]:
    """How many numbers each head gives: the outputs of its last linear layer, by first name."""
    outputs = {}
    for name, inner in _by_first_name(shapes).items():
        linear = [key for key, shape in inner.items() if len(shape) == 2 and f".{key}".endswith(".weight")]
        if linear:
            outputs[name] = inner[max(linear, key=_natural)][0]
    return outputs


def outputs_of_modules(model: PreTrainedModel) -> dict[str, int]:
    """The same for a model that is loaded: of each module beside its backbone."""
    outputs = {}
    for name, module in model.named_children():
        linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        if name != model.base_model_prefix and linear:
            outputs[name] = int(linear[-1].out_features)
    return outputs


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 10 comes after layer 2."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"[.]", name)]


def _by_first_name(shapes: Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        first, _, rest = name.partition(".")
        groups.setdefault(first, {})[rest] = shape
    return groups


def _build(shapes: Shapes, activation: str, config: PreTrainedConfig) -> nn.Module:
    """A module whose tensors have these names and shapes."""
    if "running_mean" in shapes:
        return nn.BatchNorm1d(shapes["running_mean"][0])
    weight = shapes.get("weight")
    if weight is not None and len(weight) == 2 and set(shapes) <= {"weight", "bias"}:
        return nn.Linear(weight[1], weight[0], bias="bias" in shapes)
    groups = _by_first_name(shapes)
    if "logit_scale" in groups and "layers" in groups:
        layers = _build(groups["layers"], activation, config)
        assert isinstance(layers, nn.Sequential)
        if not hasattr(config, "gating_temperature"):
            raise ConfigError("config.json lacks gating_temperature, which the gating network divides by.")
        return GatingNetwork(layers, float(config.gating_temperature))
    if any("" in inner for inner in groups.values()):
        raise ConfigError(
            f"the head has tensors {sorted(shapes)}, which do not belong to linear layers or batch norms."
        )
    built = {name: _build(inner, activation, config) for name, inner in groups.items()}
    if not all(name.isdigit() for name in built):
        return nn.Sequential(OrderedDict(built))
    # Numbers that hold no tensors are activations (after a linear layer) and dropouts, which do nothing in scoring.
    modules: list[nn.Module] = []
    for index in range(max(map(int, built)) + 1):
        after_linear = bool(modules) and isinstance(modules[-1], nn.Linear)
        nothing = ACTIVATIONS[activation]() if after_linear else nn.Identity()
        modules.append(built.get(str(index), nothing))
    return nn.Sequential(*modules)
