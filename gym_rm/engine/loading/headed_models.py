"""Heads of any name and shape, built from the tensors that a checkpoint has outside its backbone.

The heads of public reward models have many names (`score`, `v_head.summary`, `regression_head`, ...). A head is built
from the shapes of its tensors. transformers then loads backbone and head and reports missing tensors, and no code of
the checkpoint runs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from gym_rm.engine.backbones.heads import width
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
            self.add_module(name, _build(name, inner))
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
    """Return the number of outputs of each head that can be built, by its first name."""
    outputs = {}
    for name, inner in _by_first_name(shapes).items():
        with contextlib.suppress(ConfigError), torch.device("meta"):
            outputs[name] = width(_build(name, inner))
    return outputs


def require_heads(config: PreTrainedConfig, shapes: Shapes) -> None:
    """Raise ConfigError if heads of these shapes cannot be built, or do not read the hidden states of the backbone."""
    own = config.get_text_config()
    for name, inner in _by_first_name(shapes).items():
        with torch.device("meta"):
            reads = _inputs(_build(name, inner))
        if reads not in (own.hidden_size, getattr(own, "word_embed_proj_dim", None)):
            raise ConfigError(f"the head {name!r} reads {reads} numbers, not {own.hidden_size} (hidden_size): {inner}.")


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


def _build(name: str, shapes: Shapes) -> nn.Module:
    """Return a module whose tensors have these names and shapes.

    A number without tensors between two layers is ReLU, as in the `nn.Sequential` of every known family.
    """
    weight = shapes.get("weight")
    if weight is not None and len(weight) == 2 and set(shapes) <= {"weight", "bias"}:
        return nn.Linear(weight[1], weight[0], bias="bias" in shapes)
    groups = _by_first_name(shapes)
    if any("" in inner for inner in groups.values()):
        raise ConfigError(f"tensors of a head must belong to linear layers; got {name!r} with {dict(shapes)}.")
    order = sorted(groups, key=lambda key: int(key) if key.isdigit() else 0)
    parts = {key: _build(f"{name}.{key}", groups[key]) for key in order}
    modules = OrderedDict({order[0]: parts[order[0]]})
    for before, after in itertools.pairwise(order):
        if not (before.isdigit() and after.isdigit() and int(after) > int(before) + 1):
            raise ConfigError(
                f"the head {name!r} has the layers {order}, and their names do not say which function is between them; "
                "load the model with its own code, and pass it and its tokenizer to RewardModelScorer with head=."
            )
        if width(parts[before]) != _inputs(parts[after]):
            raise ConfigError(f"the layers {before!r} and {after!r} of the head {name!r} do not fit: {dict(shapes)}.")
        modules |= {f"after_{before}": nn.ReLU(), after: parts[after]}
    return nn.Sequential(modules)


def _inputs(module: nn.Module) -> int:
    return next(int(layer.in_features) for layer in module.modules() if isinstance(layer, nn.Linear))
