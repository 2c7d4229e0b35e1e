"""From a backbone's hidden states to the numbers that a kind reads: heads of any name and shape.

Shapes: hidden `[R, hidden]`, values `[R, K]` in float32 whatever the backbone's precision: products of bfloat16 would
step by 0.06 at scores around 10. Heads find their modules by name at every call, because a model in training may get
another head or an adapter between two calls.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gym_rm.engine.kinds import readouts
from gym_rm.errors import ConfigError

LOGITS_AT_ONCE = 1 << 26  # numbers: 256 MiB in float32


class Head(Protocol):
    """Hidden states `[R, hidden]` to values `[R, num_values]`."""

    num_values: int

    def __call__(self, hidden: Tensor) -> Tensor:
        """Values in float32."""
        ...


def make_head(readout: readouts.Readout, model: PreTrainedModel) -> Head:
    """The head that a readout describes, for a loaded model.

    Raises:
        ConfigError: the model has no such module, or makes its logits in an unknown way.
    """
    match readout:
        case readouts.ModuleHead(name):
            return ModuleHead(model, name)
        case readouts.TokenLogits(token_ids):
            return TokenLogits(model, token_ids)
        case readouts.GatedHead(regression, gate, outputs):
            return GatedHead(model, regression, gate, normal=outputs == "normal")
    raise AssertionError(f"{readout} is not read from single hidden states")


class ModuleHead:
    """A module of the model as its head, applied in float32.

    Args:
        model: the whole model.
        name: of the module, a linear layer or layers of them.
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self._model, self._name = model, name
        self.num_values = width(_submodule(model, name))

    def __call__(self, hidden: Tensor) -> Tensor:
        """Values in float32."""
        return in_float32(_submodule(self._model, self._name), hidden)


class GatedHead:
    """Objectives, and gates with the model's `reward_transform_matrix` folded in, side by side.

    The reward `sum_h gate_h * (objectives @ transform)_h` equals `sum_j objective_j * (gates @ transform^T)_j`.

    Args:
        model: the whole model.
        regression, gate: names of modules on hidden states.
        normal: an objective's numbers are mean and log variance, not quantiles.
    """

    def __init__(self, model: PreTrainedModel, regression: str, gate: str, *, normal: bool) -> None:
        self._model, self._regression, self._gate, self._normal = model, regression, gate, normal
        self._size = width(_submodule(model, gate))
        self.num_values = 2 * self._size

    def __call__(self, hidden: Tensor) -> Tensor:
        """Objectives and gates of hidden states, float32 `[R, 2H]`."""
        numbers = in_float32(_submodule(self._model, self._regression), hidden).reshape(len(hidden), self._size, -1)
        objectives = numbers[:, :, 0] if self._normal else numbers.mean(dim=2)
        gates = in_float32(_submodule(self._model, self._gate), hidden).to(objectives.device)
        transform = getattr(self._model, "reward_transform_matrix", None)
        if transform is not None:
            gates = (gates.double() @ transform.to(gates.device).double().T).float()
        return torch.cat([objectives, gates], dim=1)


class TokenLogits:
    """What the output layer of a causal language model gives for tokens of its vocabulary.

    Args:
        model: a `...ForCausalLM`.
        token_ids: the tokens whose logits are its values.

    Raises:
        ConfigError: not a causal language model, or one that makes its logits in a way that is not known here.
    """

    def __init__(self, model: PreTrainedModel, token_ids: tuple[int, ...] = ()) -> None:
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


def in_float32(module: nn.Module, hidden: Tensor) -> Tensor:
    """`module(hidden)` in float32; the module's own weights keep their precision."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    device = next(iter(state.values())).device
    cast = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    values: Tensor = torch.func.functional_call(module, cast, (hidden.float().to(device),))
    return values


def width(module: nn.Module) -> int:
    """How many numbers a head gives: the outputs of its last linear layer."""
    return int([layer for layer in module.modules() if isinstance(layer, nn.Linear)][-1].out_features)


def _submodule(model: PreTrainedModel, name: str) -> nn.Module:
    try:
        module: nn.Module = model.get_submodule(name)
    except AttributeError as error:
        heads = [child for child, _ in model.named_children() if child != model.base_model_prefix]
        raise ConfigError(f"{type(model).__name__} has no head {name!r}; it has {heads}. Pass head=.") from error
    return module
