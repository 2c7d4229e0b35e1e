"""Loaded models that compute the values of a batch; an executor owns them.

Shapes: values are float32 `[R, K]`, K numbers for each of the R positions where a batch is read.
"""

from __future__ import annotations

import abc
import contextlib
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gym_rm.engine.backbones.decoder import DecoderBackbone, plain_inputs, require_supported
from gym_rm.engine.backbones.devices import device_of, to_device
from gym_rm.engine.backbones.heads import AppliedModule, OutputLayer, infinities_as_nan
from gym_rm.engine.backbones.prefix_cache import PrefixCache
from gym_rm.engine.debugging import stage
from gym_rm.engine.kinds import readouts
from gym_rm.engine.token_tree import Batch, PaddedBatch, TokenTree
from gym_rm.errors import ConfigError, warn_once


class RewardModel(abc.ABC):
    """One or two loaded models, and the values that are read from them.

    Attributes:
        models: the Hugging Face models.
        num_values: K, numbers per position.
        decoders: the backbones that support trees; empty for encoders.
    """

    def __init__(self, *models: PreTrainedModel, decoders: tuple[DecoderBackbone, ...] = ()) -> None:
        self.models = models
        self.decoders = decoders
        self.num_values = 1

    @abc.abstractmethod
    def values(self, batch: Batch) -> Tensor:
        """Return the values at the positions that are read, `[R, K]`; with gradients if they are enabled."""

    def trial_values(self, batch: Batch) -> Tensor:
        """Return the values that the trial compares, `[R, ...]`; hidden states, if a head of zeros can hide errors."""
        return self.values(batch)

    def all_values(self, batch: Batch) -> Tensor:
        """Return everything that must not depend on the batch: values after the hidden states, `[R, ...]`."""
        return self.values(batch)


class HeadedDecoder(RewardModel):
    """A decoder with a head on its hidden states."""

    def __init__(self, model: PreTrainedModel, readout: readouts.Readout, prefix_cache: PrefixCache | None) -> None:
        self._backbone = DecoderBackbone(model, prefix_cache)
        super().__init__(model, decoders=(self._backbone,))
        self._head: AppliedModule | OutputLayer
        if isinstance(readout, readouts.TokenLogits):
            self._head = OutputLayer(model, readout.token_ids)
        else:
            assert isinstance(readout, readouts.ModuleHead)
            self._head = AppliedModule(model, readout.name)
        self.num_values = self._head.num_values

    def values(self, batch: Batch) -> Tensor:
        """Return the values of the head."""
        (model,) = self.models
        # With a `_hf_hook`, accelerate replaced the forward, to move inputs between devices.
        replaced = "forward" in vars(model) and not hasattr(model, "_hf_hook")
        if model._forward_hooks or model._forward_pre_hooks or replaced:
            warn_once(
                f"the hooks and the replaced forward of {type(model).__name__} do not run, because scoring runs its "
                "backbone and its head; change these modules."
            )
        hidden = self._backbone.hidden_states(batch)
        with stage("head"):
            return self._head(hidden)

    def trial_values(self, batch: Batch) -> Tensor:
        """Return the hidden states."""
        return self._backbone.hidden_states(batch)

    def all_values(self, batch: Batch) -> Tensor:
        """Return hidden states and values of one forward."""
        hidden = self._backbone.hidden_states(batch)
        return torch.cat([hidden.float(), self._head(hidden).to(hidden.device)], dim=1)


class LanguageModels(RewardModel):
    """Log-probabilities of the tokens that are read, under a causal language model, and under a reference if given.

    Raises:
        ConfigError: the vocabularies differ, or a model computes its logits in an unsupported way.
    """

    def __init__(self, *models: PreTrainedModel) -> None:
        sizes = [model.config.get_text_config().vocab_size for model in models]
        if sizes[0] != sizes[-1]:
            raise ConfigError(
                "policy and reference must have the same vocabulary; got vocabularies of "
                f"{sizes[0]} and {sizes[1]} tokens."
            )
        super().__init__(*models, decoders=tuple(map(DecoderBackbone, models)))
        self._logits = [*map(OutputLayer, models)]
        self.num_values = len(models)

    def values(self, batch: Batch) -> Tensor:
        """Return the log-probabilities under each model, `[R, K]`."""
        return torch.cat(self._states_and_values(batch)[1], dim=1)

    def all_values(self, batch: Batch) -> Tensor:
        """Return the hidden states of the models at the token before, and the log-probabilities."""
        states, columns = self._states_and_values(batch)
        return torch.cat([*(each.float().to(columns[0].device) for each in states), *columns], dim=1)

    def _states_and_values(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        earlier: Batch
        if isinstance(batch, TokenTree):
            before, tokens = batch.parents[batch.read_indices], batch.input_ids[batch.read_indices]
            # Several tokens can follow the same token; its hidden state is computed once.
            read, inverse = np.unique(before, return_inverse=True)
            earlier = replace(batch, read_indices=read)
        else:
            before = batch.read_positions - np.array([0, 1])
            tokens = batch.input_ids[batch.read_positions[:, 0], batch.read_positions[:, 1]]
            read, inverse = np.unique(before, axis=0, return_inverse=True)
            earlier = replace(batch, read_positions=read)
        targets = tokens.astype(np.int64)
        device = device_of(self.models[0])
        states, columns = [], []
        for decoder, logits in zip(self.decoders, self._logits, strict=True):
            hidden = decoder.hidden_states(earlier)
            hidden = hidden[to_device(inverse.reshape(-1), hidden.device)]
            columns.append(logits.log_probabilities(hidden, to_device(targets, hidden.device)).to(device)[:, None])
            states.append(hidden)
        return states, columns


class Classifier(RewardModel):
    """A `...ForSequenceClassification` with its own pooling; the modules outside its backbone run in float32."""

    def __init__(self, model: PreTrainedModel) -> None:
        require_supported(model)
        super().__init__(model)
        self.num_values = model.config.num_labels

    def values(self, batch: Batch) -> Tensor:
        """Return the logits of the rows that are read, `[R, num_labels]`."""
        assert isinstance(batch, PaddedBatch), "encoders need padded batches"
        (model,) = self.models
        inputs = plain_inputs(batch, model)
        heads = {name: module for name, module in model.named_children() if name != model.base_model_prefix}
        cast = {
            f"{name}.{key}": parameter.float()
            for name, module in heads.items()
            for key, parameter in module.named_parameters()
        }
        poolers = filter(None, [getattr(model.base_model, "pooler", None)])
        # The hooks are removed after this forward, because the model may also be used outside the scorer.
        with contextlib.ExitStack() as hooks, infinities_as_nan(*heads.values(), *poolers):
            for module in heads.values():
                hooks.enter_context(module.register_forward_pre_hook(_to_float32))
            logits: Tensor = torch.func.functional_call(model, cast, (), inputs).logits
        return logits.float()[to_device(np.ascontiguousarray(batch.read_positions[:, 0]), logits.device)]


def make_reward_model(
    readout: readouts.Readout,
    model: PreTrainedModel,
    reference: PreTrainedModel | None = None,
    prefix_cache: PrefixCache | None = None,
) -> RewardModel:
    """Return the reward model for a readout; only decoders with a head use the prefix cache.

    Raises:
        ConfigError: the model does not have the module that the readout needs.
    """
    match readout:
        case readouts.ClassifierLogits():
            return Classifier(model)
        case readouts.TokenLogProbabilities():
            return LanguageModels(model, *([] if reference is None else [reference]))
    return HeadedDecoder(model, readout, prefix_cache)


def _to_float32(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(
        value.float() if isinstance(value, Tensor) and value.is_floating_point() else value for value in inputs
    )
