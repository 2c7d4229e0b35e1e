"""Heads of any name and shape: from a backbone's hidden states to values.

Shapes: hidden `[R, hidden]`, values `[R, K]`. Values are float32 for every precision of the backbone, because bfloat16
numbers around 10 are 0.06 apart. Heads look up their modules by name at every call, because a model in training may get
another head or an adapter between two calls.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gym_rm.engine.backbones.batch_invariance import ROWS, Rows
from gym_rm.engine.backbones.devices import to_device
from gym_rm.engine.backbones.sharded import ColumnParallelLinear, GatheredLinear
from gym_rm.errors import ConfigError

LOGITS_AT_ONCE = 1 << 26  # maximum number of logits in memory: 256 MiB in float32
# Settings for the scale of the logits and for their soft cap, in the configurations of transformers.
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
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
        self.scale, self.cap = self._scale_and_cap()

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
        wanted = nn.functional.pad(targets, (0, Rows().padded(len(targets)) - len(targets)))
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
        hidden = nn.functional.pad(hidden, (0, 0, 0, Rows().padded(len(hidden)) - len(hidden)))
        for rows in torch.split(hidden, max(ROWS, LOGITS_AT_ONCE // layer.weight.shape[0] // ROWS * ROWS)):
            yield self._adjusted(layer(rows.to(layer.weight.device)).float())

    def _adjusted(self, logits: Tensor) -> Tensor:
        return _scaled_and_capped(logits, self.scale, self.cap)

    @torch.inference_mode()
    def _scale_and_cap(self) -> tuple[float, float | None]:
        """Return the scale and the soft cap between the model's output layer and its logits.

        They have several names in configurations. Those are right with which the logits equal the model's own, for
        outputs of the layer from 0.1 to 1000, because a cap hardly changes small ones.
        """
        layer, config = self.model.get_output_embeddings(), self.model.config.get_text_config()
        inputs: list[Tensor] = []  # of the layer: what the model passed, and what it got instead

        def replace(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if inputs:
                return None
            inputs.append(given[0])
            inputs.append(_inputs_of_magnitudes(module, given[0]))
            return (inputs[1], *given[1:])

        ids = _some_ids(self.model)
        with layer.register_forward_pre_hook(replace):
            expected = self.model(input_ids=ids, use_cache=False).logits[0].float()
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        if inputs and _equal(inputs[0][0, -1].to(hidden.device), hidden[0, -1]):
            outputs = layer(inputs[1])[0].to(expected.device)
            settings = (getattr(config, name, None) for name in SCALES)
            # Some models multiply by their setting, and others divide.
            pairs = ((float(value), 1 / float(value)) for value in settings if isinstance(value, int | float) and value)
            scales = [1.0, *itertools.chain.from_iterable(pairs)]
            caps = [*(float(cap) for name in CAPS if (cap := getattr(config, name, None))), None]
            for scale, cap in itertools.product(scales, caps):
                if _equal(_scaled_and_capped(outputs, scale, cap), expected):
                    return scale, cap
        raise ConfigError(
            f"{type(self.model).__name__} computes its logits in an unsupported way; expected a linear layer, a scale "
            "and a soft cap."
        )


def _inputs_of_magnitudes(layer: nn.Module, hidden: Tensor) -> Tensor:
    """Return inputs like `hidden` `[1, L, hidden]` whose largest outputs are 0.1, 1, ..., 1000."""
    rows = torch.randn(hidden.shape[1:], generator=torch.Generator().manual_seed(0)).to(hidden)[None]
    largest = layer(rows).float().abs().amax(dim=-1, keepdim=True).clamp_min(1e-6).to(rows.device)
    magnitudes = 10.0 ** (torch.arange(rows.shape[1], device=rows.device) % 5 - 1.0)
    scaled: Tensor = rows.float() * magnitudes[None, :, None] / largest
    return scaled.to(hidden.dtype)


def _scaled_and_capped(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    logits = logits * scale
    return logits if cap is None else cap * torch.tanh(_nan_if_infinite(logits) / cap)


def _equal(got: Tensor, expected: Tensor) -> bool:
    """Return whether values are equal, row by row, but for the rounding of their precision."""
    difference = (got.float() - expected.float()).abs().amax(dim=-1)
    largest = expected.float().abs().amax(dim=-1).clamp_min(1e-6)
    return bool((difference <= 4 * torch.finfo(got.dtype).eps * largest).all())


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
