"""Heads of any name and shape: from a backbone's hidden states to values.

Shapes: hidden `[R, hidden]`, values `[R, K]`. Values are float32 for every precision of the backbone, because bfloat16
numbers around 10 are 0.06 apart. Heads look up their modules by name at every call, because a model in training may get
another head or an adapter between two calls.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gym_rm.engine.backbones.devices import to_device
from gym_rm.engine.backbones.invariant_products import ROWS, GemmRows
from gym_rm.engine.backbones.sharded import ColumnParallelLinear, GatheredLinear
from gym_rm.errors import ConfigError

LOGITS_AT_ONCE = 1 << 26  # maximum number of logits in memory: 256 MiB in float32
# Settings of transformers between the output layer and the logits: factors, divisors and soft caps. A model without
# them has none of these, which `OutputLayer` verifies.
FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
DIVISORS = ("logits_scaling",)
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


class AppliedModule:
    """A module of the model as its head, applied in float32; it contains at least one linear layer.

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
        hidden, expected = _states_and_logits(self._model)
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


class OutputLayer:
    """Logits or log-probabilities of vocabulary tokens, from the output layer of a causal language model.

    Args:
        model: a `...ForCausalLM`.
        token_ids: tokens whose logits are the values.

    Attributes:
        scale, cap: scale and soft cap between the output layer and the logits; the cap may be None.

    Raises:
        ConfigError: the model is not a causal language model, or computes its logits in an unsupported way.
    """

    def __init__(self, model: PreTrainedModel, token_ids: tuple[int, ...] = ()) -> None:
        if model.get_output_embeddings() is None:
            raise ConfigError(
                f"{type(model).__name__} has no output layer over a vocabulary; expected a causal language model."
            )
        self.model = model
        self.token_ids = np.array(token_ids, dtype=np.int64)
        self.num_values = len(self.token_ids)
        self.scale = math.prod(_settings(model, FACTORS)) / math.prod(_settings(model, DIVISORS))
        self.cap = next(iter(_settings(model, CAPS)), None)
        self._compare_with_model()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits of the tokens `[R, num_values]`, in float32."""
        layer = self.model.get_output_embeddings()
        ids = to_device(self.token_ids, layer.weight.device)
        plain = type(layer) in (nn.Linear, ColumnParallelLinear, GatheredLinear) and "forward" not in vars(layer)
        if not plain or layer._forward_hooks or layer._forward_pre_hooks:
            return torch.cat([logits[:, ids] for logits in self._all_logits(hidden)])[: len(hidden)]
        weight = layer.rows(ids) if isinstance(layer, ColumnParallelLinear) else layer.weight[ids]
        bias = None if layer.bias is None else layer.bias[ids].float()
        return self._adjusted(nn.functional.linear(hidden.float().to(weight.device), weight.float(), bias))

    def log_probabilities(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probabilities `[R]` of the targets `[R]`, given hidden states `[R, hidden]`, in float32."""
        parts, start = [], 0
        wanted = nn.functional.pad(targets, (0, GemmRows().padded(len(targets)) - len(targets)))
        for logits in self._all_logits(hidden):
            part = wanted[start : start + len(logits)].to(logits.device)
            start += len(logits)
            parts.append(logits.gather(1, part[:, None])[:, 0] - logits.logsumexp(dim=1))
        return torch.cat(parts)[: len(hidden)]

    def _all_logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """Yield the logits of the whole vocabulary, of some rows at a time; the rows are padded to whole groups.

        The sum over the vocabulary of a single row is divided among threads, and of several rows it is not.
        """
        layer = self.model.get_output_embeddings()
        hidden = nn.functional.pad(hidden, (0, 0, 0, GemmRows().padded(len(hidden)) - len(hidden)))
        for rows in torch.split(hidden, max(ROWS, LOGITS_AT_ONCE // layer.weight.shape[0] // ROWS * ROWS)):
            yield self._adjusted(layer(rows.to(layer.weight.device)).float())

    def _adjusted(self, logits: Tensor) -> Tensor:
        logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(_nan_if_infinite(logits) / self.cap)

    @torch.inference_mode()
    def _compare_with_model(self) -> None:
        layer = self.model.get_output_embeddings()
        hidden, expected = _states_and_logits(self.model)
        got = self._adjusted(layer(hidden.to(layer.weight.device))[0].float()).to(expected.device)
        difference = (got - expected).abs().amax(dim=-1)
        rounding = 4 * torch.finfo(hidden.dtype).eps * expected.abs().amax(dim=-1).clamp_min(1e-6)
        if not (difference <= rounding).all():
            raise ConfigError(
                f"{type(self.model).__name__} computes its logits in an unsupported way; expected a linear layer, a "
                "scale and a soft cap with settings of known names."
            )


def _settings(model: PreTrainedModel, names: Sequence[str]) -> list[float]:
    """Return the settings of these names that a model's configuration has."""
    values = (getattr(model.config.get_text_config(), name, None) for name in names)
    return [float(value) for value in values if isinstance(value, int | float) and value]


def _states_and_logits(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return the last hidden states `[1, L, hidden]` of a few tokens, and the model's own logits in float32."""
    ids = _some_ids(model)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden, model(input_ids=ids, use_cache=False).logits[0].float()


def _some_ids(model: PreTrainedModel) -> Tensor:
    """Return a few token ids `[1, 8]` for a comparison with the model's own output; none of them is padding."""
    config = model.config.get_text_config()
    padding = getattr(config, "pad_token_id", None)
    ids = [token % config.vocab_size for token in range(1, 10) if token % config.vocab_size != padding]
    return torch.tensor([ids[:8]], device=next(model.parameters()).device)


@contextlib.contextmanager
def infinities_as_nan(*modules: nn.Module) -> Iterator[None]:
    """Let modules return NaN for infinite numbers, which the next activation could turn into plausible ones."""
    with contextlib.ExitStack() as hooks:
        for part in (part for module in modules for part in module.modules()):
            hooks.enter_context(part.register_forward_hook(lambda part, inputs, output: _nan_if_infinite(output)))
        yield


def _nan_if_infinite(x: Any) -> Any:
    return x.masked_fill(x.isinf(), torch.nan) if isinstance(x, Tensor) else x


def in_float32(module: nn.Module, hidden: Tensor) -> Tensor:
    """Return `module(hidden)` computed in float32; the module's own weights keep their precision."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    device = next((tensor.device for tensor in state.values()), hidden.device)
    cast = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    with torch.autocast(hidden.device.type, enabled=False), infinities_as_nan(module):
        if all(cast[name] is tensor for name, tensor in state.items()):
            values: Tensor = module(hidden.float().to(device))
        else:
            values = torch.func.functional_call(module, cast, (hidden.float().to(device),))
    return values


def width(module: nn.Module) -> int:
    """Return the number of outputs of a head, taken from its last linear layer."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise ConfigError(f"a head must have a linear layer, got {type(module).__name__}.")
    return int(layers[-1].out_features)


def _submodule(model: PreTrainedModel, name: str) -> nn.Module:
    try:
        module: nn.Module = model.get_submodule(name)
    except AttributeError as error:
        heads = [child for child, _ in model.named_children() if child != model.base_model_prefix]
        raise ConfigError(f"{type(model).__name__} has no head {name!r}; pass one of {heads} as head=.") from error
    return module
