"""What stands between a backbone's hidden states and the numbers: score heads of any name and shape.

Public reward models keep their heads under many names (`score`, `v_head.summary`, `regression_head`, ...). Here a
head is built from the shapes of the tensors that the checkpoint holds beside its backbone, so that transformers can
load both and say what is missing; no code of the checkpoint runs.

Shapes: hidden `[R, hidden]`, values `[R, K]` in float32 whatever the backbone's precision: products of bfloat16 would
step by 0.06 at scores around 10.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from gym_rm.errors import ConfigError

Shapes = Mapping[str, tuple[int, ...]]
LOGITS_AT_ONCE = 1 << 26  # numbers: 256 MiB in float32
ACTIVATIONS = {"relu": nn.ReLU, "selu": nn.SELU, "tanh": nn.Tanh}


class Head(Protocol):
    """Hidden states `[R, hidden]` to values `[R, num_values]`."""

    num_values: int

    def __call__(self, hidden: Tensor) -> Tensor:
        """Values in float32."""
        ...


class ModuleHead:
    """A module of the model as its head, applied in float32.

    Args:
        module: a linear layer, or layers of them.
        num_values: numbers that it gives.
    """

    def __init__(self, module: nn.Module, num_values: int) -> None:
        self.module = module
        self.num_values = num_values

    def __call__(self, hidden: Tensor) -> Tensor:
        """Values in float32."""
        return in_float32(self.module, hidden)


class TokenLogits:
    """What the output layer of a causal language model says of tokens of its vocabulary.

    Args:
        model: a `...ForCausalLM`.
        token_ids: the tokens whose logits are its values.

    Raises:
        ConfigError: not a causal language model, or one that makes its logits in a way that is not known here.
    """

    def __init__(self, model: PreTrainedModel, token_ids: Sequence[int] = ()) -> None:
        if model.get_output_embeddings() is None:
            raise ConfigError(
                f"{type(model).__name__} has no output layer over a vocabulary; expected a causal language model."
            )
        self.model = model
        self.token_ids = list(token_ids)
        self.num_values = len(self.token_ids)
        config = model.config.get_text_config()
        self._cap = getattr(config, "final_logit_softcapping", None)
        self._scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self._compare_with_model()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits of the tokens `[R, num_values]`, in float32."""
        layer = self.model.get_output_embeddings()
        bias = getattr(layer, "bias", None)
        weight = layer.weight[self.token_ids].float()
        bias = None if bias is None else bias[self.token_ids].float()
        return self._adjusted(nn.functional.linear(hidden.float().to(weight.device), weight, bias))

    def log_probabilities(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Log-probability `[R]` of `targets[r]` after the hidden state `[R, hidden]`: softmax in float32."""
        layer = self.model.get_output_embeddings()
        rows = max(1, LOGITS_AT_ONCE // layer.weight.shape[0])
        parts = []
        for some, wanted in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
            logits = self._adjusted(layer(some.to(layer.weight.device)).float())
            chosen = logits.gather(1, wanted.to(logits.device)[:, None])[:, 0]
            parts.append(chosen - logits.logsumexp(dim=1))
        return torch.cat(parts)

    def _adjusted(self, logits: Tensor) -> Tensor:
        logits = logits * self._scale
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)

    @torch.inference_mode()
    def _compare_with_model(self) -> None:
        device = next(self.model.parameters()).device
        ids = torch.arange(1, 9, device=device)[None] % self.model.config.get_text_config().vocab_size
        expected = self.model(input_ids=ids, use_cache=False).logits[0].float()
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        got = self._adjusted(self.model.get_output_embeddings()(hidden).float())
        largest = float(expected.abs().max())
        if not float((got - expected).abs().max()) <= 0.05 * max(largest, 1e-3):
            raise ConfigError(
                f"{type(self.model).__name__} makes its logits in another way than a linear layer, a scale and a soft "
                "cap; this kind of reward model cannot read it."
            )


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


def in_float32(module: nn.Module, hidden: Tensor) -> Tensor:
    """`module(hidden)` in float32, the module's own weights left in their precision."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    device = next(iter(state.values())).device
    cast = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    values: Tensor = torch.func.functional_call(module, cast, (hidden.float().to(device),))
    return values


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
        ConfigError: tensors that are no linear layers, batch norms or a gating network.
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


def width(module: nn.Module) -> int:
    """Numbers that a head gives: the outputs of its last linear layer."""
    return int([layer for layer in module.modules() if isinstance(layer, nn.Linear)][-1].out_features)


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
            raise ConfigError("config.json names no gating_temperature, which the gating network divides by.")
        return GatingNetwork(layers, float(config.gating_temperature))
    if any("" in inner for inner in groups.values()):
        raise ConfigError(f"the head has tensors {sorted(shapes)}, which are no linear layers or batch norms.")
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
