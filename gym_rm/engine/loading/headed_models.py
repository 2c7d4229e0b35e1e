"""Heads of any name and shape, built from the tensors that a checkpoint has outside its backbone.

The heads of public reward models have many names (`score`, `v_head.summary`, `regression_head`, ...). A head is built
from the shapes of its tensors. transformers then loads backbone and head and reports missing tensors, and no code of
the checkpoint runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from gym_rm.errors import ConfigError

Shapes = Mapping[str, tuple[int, ...]]


def headed_model(config: PreTrainedConfig, shapes: Shapes) -> type[PreTrainedModel]:
    """Return a model class with the configuration's backbone and heads of these shapes, for `from_pretrained`.

    `shapes` has the shape of every tensor outside the backbone, by its name in the checkpoint.

    Raises:
        ConfigError: a tensor does not belong to a linear layer.
    """
    backbone_class = MODEL_MAPPING[type(config)]
    prefix = str(backbone_class.base_model_prefix)
    parent = next(c for c in backbone_class.__mro__[1:] if issubclass(c, PreTrainedModel))

    def __init__(self: Any, config: PreTrainedConfig) -> None:
        parent.__init__(self, config)
        setattr(self, prefix, backbone_class(config))
        for name, inner in _by_first_name(shapes).items():
            self.add_module(name, _build(inner))
        self.post_init()

    attributes: dict[str, Any] = {
        "__init__": __init__,
        "__module__": __name__,
        "base_model_prefix": prefix,
        # Quantisation also skips these modules.
        "_keep_in_fp32_modules_strict": sorted(_by_first_name(shapes)),
    }
    return type(f"{backbone_class.__name__}WithHeads", (parent,), attributes)


def outputs_of_heads(shapes: Shapes) -> dict[str, int]:
    """Return the number of outputs of each head, by its first name, from the shape of its last linear layer."""
    outputs = {}
    for name, inner in _by_first_name(shapes).items():
        linear = [key for key, shape in inner.items() if len(shape) == 2 and f".{key}".endswith(".weight")]
        if linear:
            # Layer 10 comes after layer 2.
            last = max(linear, key=lambda key: [(int(x), "") if x.isdigit() else (-1, x) for x in key.split(".")])
            outputs[name] = inner[last][0]
    return outputs


def outputs_of_modules(model: PreTrainedModel) -> dict[str, int]:
    """Return the number of outputs of each head of a loaded model, by its name."""
    outputs = {}
    for name, module in model.named_children():
        linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        if name != model.base_model_prefix and linear:
            outputs[name] = int(linear[-1].out_features)
    return outputs


def _by_first_name(shapes: Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        first, _, rest = name.partition(".")
        groups.setdefault(first, {})[rest] = shape
    return groups


def _build(shapes: Shapes) -> nn.Module:
    """Return a module whose tensors have these names and shapes; ReLU is between the linear layers of a head."""
    weight = shapes.get("weight")
    if weight is not None and len(weight) == 2 and set(shapes) <= {"weight", "bias"}:
        return nn.Linear(weight[1], weight[0], bias="bias" in shapes)
    groups = _by_first_name(shapes)
    if any("" in inner for inner in groups.values()):
        raise ConfigError(f"tensors of a head must belong to linear layers; got {sorted(shapes)}.")
    built = {name: _build(inner) for name, inner in groups.items()}
    if not all(name.isdigit() for name in built):
        return nn.Sequential(OrderedDict(built))
    # Indices without tensors are activations (after a linear layer) or dropouts, which do nothing in scoring.
    modules: list[nn.Module] = []
    for index in range(max(map(int, built)) + 1):
        default = nn.ReLU() if modules and isinstance(modules[-1], nn.Linear) else nn.Identity()
        modules.append(built.get(str(index), default))
    return nn.Sequential(*modules)
