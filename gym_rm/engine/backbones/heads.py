"""Heads of any name and shape: from a backbone's hidden states to values.

Shapes: hidden `[R, hidden]`, values `[R, K]`. Values are float32 for every precision of the backbone, because bfloat16
numbers around 10 are 0.06 apart. Heads look up their modules by name at every call, because a model in training may get
another head or an adapter between two calls.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gym_rm.engine.kinds import readouts
from gym_rm.errors import ConfigError

LOGITS_AT_ONCE = 1 << 26  # maximum number of logits in memory: 256 MiB in float32


class Head(Protocol):
    """Function from hidden states `[R, hidden]` to values `[R, num_values]`."""

    num_values: int

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the values in float32."""
        ...


def make_head(readout: readouts.Readout, model: PreTrainedModel) -> Head:
    """Return the head of a loaded model for a readout.

    Raises:
        ConfigError: the model has no such module, or computes its logits in an unsupported way.
    """
    match readout:
        case readouts.ModuleHead(name):
            return ModuleHead(model, name)
        case readouts.TokenLogits(token_ids):
            return TokenLogits(model, token_ids)
        case readouts.GatedHead(regression, gate, outputs):
            return GatedHead(model, regression, gate, normal=outputs == "normal")
    raise AssertionError(f"expected a readout of single hidden states, got {readout}")


class ModuleHead:
    """A module of the model as its head, applied in float32.

    Args:
        model: the whole model.
        name: name of the module, which contains at least one linear layer.

    Raises:
        ConfigError: the model has no such module, or it is a sequence classifier that returns other values than those
            of the module.
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self._model, self._name = model, name
        self.num_values = width(_submodule(model, name))
        if type(model).__name__.endswith("ForSequenceClassification"):
            self._compare_with_model()

    @torch.inference_mode()
    def _compare_with_model(self) -> None:
        head = _submodule(self._model, self._name)
        ids = _some_ids(self._model)
        expected = self._model(input_ids=ids, use_cache=False).logits[0].float()
        hidden = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        got = head(hidden.to(next(head.parameters()).device))[0, -1].float().to(expected.device)
        if got.shape != expected.shape or not torch.allclose(got, expected, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise ConfigError(
                f"{type(self._model).__name__} returns {expected.tolist()} for a text whose last token has "
                f"{got.tolist()} at its head {self._name!r}, so its forward does more than apply the head; pass a "
                "function that calls the model as the reward model."
            )

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the values in float32."""
        return in_float32(_submodule(self._model, self._name), hidden)


class GatedHead:
    """Objectives and gates, concatenated; the gates are multiplied by the model's `reward_transform_matrix`.

    The reward `sum_h gate_h * (objectives @ transform)_h` equals `sum_j objective_j * (gates @ transform^T)_j`.

    Args:
        model: the whole model.
        regression, gate: names of the modules that compute objectives and gates from hidden states.
        normal: whether the numbers of an objective are mean and log variance; if False, they are quantiles.
    """

    def __init__(self, model: PreTrainedModel, regression: str, gate: str, *, normal: bool) -> None:
        self._model, self._regression, self._gate, self._normal = model, regression, gate, normal
        self._size = width(_submodule(model, gate))
        self.num_values = 2 * self._size

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return objectives and gates, float32 `[R, 2H]`."""
        numbers = in_float32(_submodule(self._model, self._regression), hidden).reshape(len(hidden), self._size, -1)
        objectives = numbers[:, :, 0] if self._normal else numbers.mean(dim=2)
        gates = in_float32(_submodule(self._model, self._gate), hidden).to(objectives.device)
        transform = getattr(self._model, "reward_transform_matrix", None)
        if transform is not None:
            gates = (gates.double() @ transform.to(gates.device).double().T).float()
        return torch.cat([objectives, gates], dim=1)


class TokenLogits:
    """Logits or log-probabilities of vocabulary tokens, from the output layer of a causal language model.

    Args:
        model: a `...ForCausalLM`.
        token_ids: tokens whose logits are the values.

    Raises:
        ConfigError: the model is not a causal language model, or computes its logits in an unsupported way.
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
        """Return the logits of the tokens `[R, num_values]`, in float32."""
        layer = self.model.get_output_embeddings()
        bias = getattr(layer, "bias", None)
        weight = layer.weight[self.token_ids].float()
        bias = None if bias is None else bias[self.token_ids].float()
        return self._adjusted(nn.functional.linear(hidden.float().to(weight.device), weight, bias))

    def log_probabilities(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probabilities `[R]` of the targets `[R]`, given hidden states `[R, hidden]`, in float32."""
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
        ids = _some_ids(self.model)
        expected = self.model(input_ids=ids, use_cache=False).logits[0].float()
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        got = self._adjusted(self.model.get_output_embeddings()(hidden).float())
        largest = float(expected.abs().max())
        if not float((got - expected).abs().max()) <= 0.05 * max(largest, 1e-3):
            raise ConfigError(
                f"{type(self.model).__name__} computes its logits in an unsupported way; expected a linear layer, a "
                "scale and a soft cap."
            )


def _some_ids(model: PreTrainedModel) -> Tensor:
    """Return a few token ids `[1, 8]` for a comparison with the model's own output; none of them is padding."""
    config = model.config.get_text_config()
    padding = getattr(config, "pad_token_id", None)
    ids = [token % config.vocab_size for token in range(1, 10) if token % config.vocab_size != padding]
    return torch.tensor([ids[:8]], device=next(model.parameters()).device)


def in_float32(module: nn.Module, hidden: Tensor) -> Tensor:
    """Return `module(hidden)` computed in float32; the module's own weights keep their precision."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    device = next(iter(state.values())).device
    cast = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    values: Tensor = torch.func.functional_call(module, cast, (hidden.float().to(device),))
    return values


def width(module: nn.Module) -> int:
    """Return the number of outputs of a head, taken from its last linear layer."""
    return int([layer for layer in module.modules() if isinstance(layer, nn.Linear)][-1].out_features)


def _submodule(model: PreTrainedModel, name: str) -> nn.Module:
    try:
        module: nn.Module = model.get_submodule(name)
    except AttributeError as error:
        heads = [child for child, _ in model.named_children() if child != model.base_model_prefix]
        raise ConfigError(f"{type(model).__name__} has no head {name!r}; pass one of {heads} as head=.") from error
    return module
