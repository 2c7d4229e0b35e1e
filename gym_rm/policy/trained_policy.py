"""The policy of a run: open it, and compute the log-probabilities of sampled tokens over token trees."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from gym_rm.checks import model_source
from gym_rm.engine.backbones.decoder import DecoderBackbone
from gym_rm.engine.backbones.devices import to_device
from gym_rm.engine.backbones.heads import OutputLayer
from gym_rm.engine.token_tree import Batch
from gym_rm.errors import ConfigError
from gym_rm.generation.models import open_chat_model
from gym_rm.lora_settings import LoRASettings
from gym_rm.policy.token_log_probs import LogitOptions, token_log_probs
from gym_rm.policy.turn_batches import PolicyBatch
from gym_rm.training.adapters import Adaptable, with_adapters

EMBEDDED = "embedded:policy"
DROPS = re.compile("drop|jitter")  # probabilities and noise that layers apply in training


StartPolicy: TypeAlias = Adaptable
"""The policy that a run starts from, in evaluation mode; its name may be `"embedded"`. Its tokenizer has a chat
template and a padding token, and pads on the left."""


def open_policy(
    path: str | None, *, lora: LoRASettings | None = None, dtype: torch.dtype = torch.float32, seed: int = 0
) -> StartPolicy:
    """Return the policy that training starts from.

    Args:
        path, dtype: folder or hub id of a chat model (None for the embedded policy), and type of the weights.
        lora, seed: adapters to train instead of all weights, and their seed.

    Raises:
        ConfigError: there is no such model, a file is malformed, the model has no output layer over its vocabulary or
            lacks weights, or its tokenizer has no chat template.
    """
    path = EMBEDDED if path is None else path
    source, name = model_source("policy.model", path), "embedded" if path == EMBEDDED else path
    if lora is not None and lora.dropout:
        raise ConfigError(
            f"policy.lora.dropout={lora.dropout} changes the probabilities of sampled tokens at random; set it to 0."
        )
    model, tokenizer = open_chat_model(source, option="policy.model", dtype=dtype)
    peft = None if lora is None else with_adapters(model, lora, source, seed, owner="policy", task="CAUSAL_LM")
    return StartPolicy(model, peft, tokenizer, name)


def save_policy(start: StartPolicy, folder: Path, weights: Mapping[str, Tensor], *, tied_once: bool = True) -> None:
    """Write a policy into a folder as a plain Hugging Face checkpoint; adapters are merged into their base.

    Args:
        start: the policy that the run started from, whose classes and configuration are saved.
        folder: an empty folder.
        weights: the trained parameters on the CPU, by their names in `start.trained`.
        tied_once: write a weight that several layers share under one of their names, as others do. False writes it
            under each: a server that loads new weights keeps the old ones of a layer that is not in the files.
    """
    model = start.model
    if start.peft is not None:
        twin = copy.deepcopy(start.peft).cpu()
        twin.load_state_dict(dict(weights), strict=False)
        model, weights = twin.merge_and_unload(), {}
    first = {id(each): name for name, each in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for name, each in model.state_dict(keep_vars=True).items():
        source = first.get(id(each), name)
        value = weights.get(source, each.detach())
        if isinstance(value, DTensor):
            continue  # a buffer of a sharded model
        if source == name:
            tensors[name] = value
        elif not tied_once:
            tensors[name] = value.clone()
    model.save_pretrained(folder, state_dict=tensors)
    start.tokenizer.save_pretrained(folder)


def switch_off_dropout(model: nn.Module) -> None:
    """Set all probabilities of dropout, and the noise of routers, to 0: a ratio needs the same function every time."""
    for part in model.modules():
        for name, value in list(vars(part).items()):
            drops = isinstance(part, nn.Dropout) and name == "p"
            if isinstance(value, float) and (drops or DROPS.search(name)):
                setattr(part, name, 0.0)


class TrainedPolicy(nn.Module):
    """The module whose forward runs in training: a batch in, log-probabilities and entropies `[N]` out.

    Args:
        start, temperature: the policy, and its sampling temperature.
        chunk_tokens: tokens whose logits are in memory at a time; None for a number that suits the device.

    Attributes:
        decoders: the backbone, for `choose_layout`.
        has_unused: whether some parameters change no value; `choose_layout` finds out.

    Raises:
        ConfigError: the output layer cannot run apart from the model.

    Example:
        >>> policy = TrainedPolicy(open_policy(None))
        >>> layout = choose_layout(policy, policy.start.model, tree=True, fuse=True)  # doctest: +SKIP
        >>> log_probs, entropy = policy(batch)  # doctest: +SKIP
    """

    def __init__(self, start: StartPolicy, *, temperature: float = 1.0, chunk_tokens: int | None = None) -> None:
        super().__init__()
        switch_off_dropout(start.model)
        self.start = start
        self.model = start.trained
        self.chunk_tokens = chunk_tokens
        self.has_unused = False
        self._decoder = DecoderBackbone(start.model)
        self._decoder.same_as_training = True
        self.decoders: tuple[DecoderBackbone, ...] = (self._decoder,)
        try:
            if type(start.model.get_output_embeddings()) is not nn.Linear:
                raise ConfigError(f"it is a {type(start.model.get_output_embeddings()).__name__}")
            layer = OutputLayer(start.model)
            self.options = LogitOptions(temperature, layer.scale, layer.cap)
        except (ConfigError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"policy.model={start.name!r}: its output layer cannot run apart from the model: {error}."
            ) from error
        self.eval()

    def forward(self, batch: PolicyBatch) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the sampled tokens at the temperature, and the entropies, float32 `[N]`."""
        values = torch.cat([self.trial_values(part) for part in batch.batches])
        states = values[to_device(batch.value_index, values.device)]
        head = self.start.model.get_output_embeddings()
        log_probs, entropy = token_log_probs(
            states,
            head.weight,
            head.bias,
            to_device(batch.targets, values.device),
            options=self.options,
            chunk_tokens=self.chunk_tokens,
        )
        index = to_device(batch.token_index, log_probs.device)
        return log_probs[index], entropy[index]

    def trial_values(self, batch: Batch) -> Tensor:
        """Return what the output layer reads `[R, hidden]`."""
        return self._decoder.hidden_states(batch)

    def train(self, mode: bool = True) -> TrainedPolicy:
        """Keep evaluation mode, because a ratio needs the same function every time; only checkpointing is switched."""
        super().train(False)
        for part in self.modules():
            if isinstance(part, GradientCheckpointingLayer):
                part.training = mode and part.gradient_checkpointing
        return self
