"""Open chat models: a causal language model with its output layer, and a tokenizer with a chat template."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from gym_rm.engine.loading.checkpoint import LoadOptions, load_model, open_checkpoint
from gym_rm.engine.text.templates import own_template
from gym_rm.errors import ConfigError

# Names of classes with an output layer over the vocabulary.
WRITES_TEXT = re.compile("CausalLM|LMHead|ConditionalGeneration")


def open_chat_model(
    source: str,
    *,
    option: str,
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    revision: str | None = None,
) -> tuple[PreTrainedModel, Any]:
    """Return a chat model in evaluation mode, and its tokenizer, which pads on the left.

    Args:
        source: folder or hub id.
        option: name of the setting that contains it, for error messages.
        dtype: type of the weights; `"auto"` is the checkpoint's own on a GPU, else float32.
        device: device of the model; `"auto"` is the GPU if there is one.
        revision: commit, branch or tag of a hub repository.

    Raises:
        ConfigError: there is no such model, a file is malformed, the model has no output layer over its vocabulary or
            lacks weights, or its tokenizer has no chat template.
    """
    options = LoadOptions(path=source, kind="generative", dtype=dtype, device=device, revision=revision)
    checkpoint = open_checkpoint(options, option=option)
    if checkpoint.adapter is not None:
        raise ConfigError(f"{option}={source!r} is an adapter; merge it into its base, and pass the result.")
    names = checkpoint.config.architectures or [type(checkpoint.config).__name__]
    causal = type(checkpoint.config) in AutoModelForCausalLM._model_mapping
    if not causal or (checkpoint.config.architectures and not any(map(WRITES_TEXT.search, names))):
        raise ConfigError(
            f"{option}={source!r} is a {'/'.join(names)}; expected a chat model with its output layer "
            "(...ForCausalLM); a reward model goes to env.reward_model."
        )
    model, tokenizer = load_model(checkpoint), checkpoint.tokenizer
    if own_template(tokenizer) is None:
        raise ConfigError(f"{option}={source!r} has no chat template; use a chat model, whose tokenizer has one.")
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer
